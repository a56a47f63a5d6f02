"""Each proof notes the seconds that it computed, which do not depend on what else the machine does."""

import time

import pytest


@pytest.fixture(autouse=True)
def seconds_are_recorded(record_property):
    start = time.process_time()
    yield
    record_property("seconds", round(time.process_time() - start, 2))
