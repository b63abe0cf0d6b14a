"""The table of private names is that of the source, and every name has a reason."""

from tools import private_names


def test_the_table_is_up_to_date_and_every_name_has_its_reason() -> None:
    told = private_names.told()
    assert private_names.PAGE.read_text() == private_names.page(told), "run `python tools/private_names.py`"
    assert [name for name, (owner, why) in told.items() if not owner or not why] == [], "say why in docs"


def test_private_names_are_found_however_they_are_written() -> None:
    code = """
import torch._dynamo
import torch.nn as nn
from ray._private.node import Node
from vllm.v1.engine import core
from os import _exit

class Own(Node):
    _theirs: int

    def __init__(self):
        self._mine = nn.Module._version = 1
        self._theirs = super()._make()
        core.engine._private.public(self._mine, nn.Linear, _exit)

def use(module, row):
    text = "ray._private.services.start"
    return getattr(module, "_buffers"), module._parameters, row._replace(), module._mine, module.__dict__
"""
    nodes = private_names.nodes_of(code)
    assert private_names.names_in(nodes, set(private_names.own_names(nodes))) == {
        *(
            "torch._dynamo",
            "torch.nn.Module._version",
            "ray._private.node.Node",
            "vllm.v1.engine.core.engine._private.public",
        ),
        *("ray._private.services.start", "._theirs", "._make", "._buffers", "._parameters"),
    }
