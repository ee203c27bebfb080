import pytest

from chunkattn.backends.cpu import build, linear
from tests.cpu_kernels import use


@pytest.fixture(params=list(build.kernels()))
def kernel(request):
    """One native kernel after the other, where this machine has its instructions."""
    if reason := use(request.param):
        assert "lacks its instructions" in reason
        pytest.skip(f"{request.param}: {reason}")
    linear.order.cache_clear()
    yield request.param
    use("")
    linear.order.cache_clear()
