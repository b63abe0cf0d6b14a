"""Names of NeMo RL lead to ours (`nemo_rl/compat.py`), processes share bytecode (`nemo_rl/utils/bytecode.py`), and
libraries have caches that they can write (`nemo_rl/utils/folders.py`)."""

from nemo_rl.compat import install
from nemo_rl.utils.bytecode import share_bytecode
from nemo_rl.utils.folders import move_caches

move_caches()
share_bytecode()
install()
