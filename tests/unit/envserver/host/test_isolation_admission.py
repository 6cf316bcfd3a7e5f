"""Which pools and templates a weak wall is good enough for."""

import pytest

from etude.common.api.pool.spec import EnvPoolSpec, Isolation, IsolationLevel, Template, Trust
from etude.envserver.drivers.base import DriverUnavailableError, IsolationStrength
from etude.envserver.host.server import IsolationAdmission, check_isolation


def pool(minimum: IsolationLevel) -> EnvPoolSpec:
    return EnvPoolSpec(
        templates=(Template(name="own", trust=Trust.TRUSTED), Template(name="foreign")),
        isolation=Isolation(minimum=minimum),
    )


def of(spec: EnvPoolSpec, *, allow_weak: bool = False) -> IsolationAdmission:
    return check_isolation(spec, "process", IsolationStrength.WEAK, allow_weak=allow_weak)


@pytest.mark.parametrize("minimum", [IsolationLevel.MICRO_VM, IsolationLevel.SANDBOX])
def test_a_pool_that_wants_a_stronger_wall_is_refused_whatever_the_host_allows(
    minimum: IsolationLevel,
) -> None:
    with pytest.raises(DriverUnavailableError) as caught:
        of(pool(minimum), allow_weak=True)

    assert minimum in str(caught.value)
    assert "fix: " in str(caught.value)


def test_an_untrusted_template_is_refused_and_a_trusted_one_served() -> None:
    served, refused = of(pool(IsolationLevel.PROCESS))

    assert served == {"own"}
    assert refused.keys() == {"foreign"}


def test_a_host_may_allow_weak_isolation() -> None:
    served, refused = of(pool(IsolationLevel.PROCESS), allow_weak=True)

    assert served == {"own", "foreign"}
    assert refused == {}
