"""Each proof notes the seconds that the process computed, which do not depend on what else the machine does."""

import time

import pytest


@pytest.fixture(autouse=True)
def seconds_are_recorded(request):
    start = time.process_time()
    yield
    request.node.user_properties.append(("seconds", round(time.process_time() - start, 2)))  # `record_property` refuses pytest's own family
