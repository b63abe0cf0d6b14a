"""Names of NeMo RL lead to ours (`nemo_rl/compat.py`), and processes share bytecode (`nemo_rl/utils/bytecode.py`)."""

from nemo_rl.compat import install
from nemo_rl.utils.bytecode import share_bytecode

share_bytecode()
install()
