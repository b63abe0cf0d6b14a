"""Module paths and names of NeMo RL lead to ours; see `nemo_rl/compat/names.py`."""

from nemo_rl.compat.names import install

install()
