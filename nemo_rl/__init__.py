"""Module paths and names of NeMo RL lead to ours; see `nemo_rl/compat.py`."""

from nemo_rl.compat import install

install()
