"""Private names of torch that tcemu uses exist in the torch that is installed."""

from functools import reduce

import pytest
from support.private_names import names_of
from support.systems import skip_file
from support.torch_helpers import MISSING, torch

skip_file(MISSING if torch is None else "")


@pytest.mark.parametrize("name", names_of("torch"))
def test_a_private_name_exists(name):
    assert reduce(getattr, name.split(".")[1:], torch) is not None


def test_private_attributes_of_tensors_and_operators_exist():
    x = torch.ones(2)
    assert torch.ops.aten.add.Tensor._schema.name == "aten::add" and x.view(2, 1)._base is x and x.untyped_storage()._cdata
