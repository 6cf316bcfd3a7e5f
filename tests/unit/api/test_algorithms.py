"""What the parameters of an algorithm accept, and how they refuse."""

import pytest
from pydantic import JsonValue

from etude.common.api.run.algorithms import PARAMETERS, DrGRPOParameters, check_algorithm


def test_the_defaults_of_every_algorithm_are_valid() -> None:
    for name, model in PARAMETERS.items():
        assert check_algorithm(name, {}) == model()


def test_numbers_may_be_written_as_decimal_text() -> None:
    parameters = check_algorithm("DrGRPO", {"clipHigh": "0.3", "lossScale": 64})
    assert isinstance(parameters, DrGRPOParameters)
    assert (parameters.clip_high, parameters.loss_scale) == (0.3, 64.0)


def test_an_unknown_parameter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"algorithm\.parameters\.clipLwo: GRPO has no such .*clipLow"
    ):
        check_algorithm("GRPO", {"clipLwo": 0.1})


def test_a_parameter_of_another_algorithm_is_refused() -> None:
    with pytest.raises(ValueError, match="lossScale: GRPO has no such parameter"):
        check_algorithm("GRPO", {"lossScale": 64})


@pytest.mark.parametrize(
    "value", ["NaN", "inf", -0.1, 0, 1e-320, True, None, "much", [0.2], 10**400]
)
def test_a_value_out_of_range_is_refused_with_its_range(value: object) -> None:
    with pytest.raises(ValueError, match=r"clipLow: .* is not a number from 0.0001 to 1"):
        check_algorithm("DrGRPO", {"clipLow": value})  # type: ignore[dict-item]  # on purpose


def test_clipping_beside_a_correction_is_refused_because_it_would_be_ignored() -> None:
    with pytest.raises(ValueError, match="clipLow and clipHigh are ignored with correction TIS"):
        check_algorithm("DrGRPO", {"clipLow": 0.2, "correction": {"kind": "TIS", "high": 2}})


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("CISPO", {"clipHigh": 0.3}, "clipHigh is ignored with correction TIS"),
        ("GSPO", {"clipLow": 0.1, "updatesPerBatch": 1}, "clipLow and clipHigh are ignored"),
        ("SAPO", {"temperaturePositive": 2}, "temperaturePositive and temperatureNegative are"),
        ("CISPO", {"clipLow": 0.2}, "clipLow: CISPO has no such parameter"),
        ("DPPO", {}, "correction: DPPO has no such parameter"),
        ("DecoupledPPO", {}, "correction: DecoupledPPO has no such parameter"),
    ],
)
def test_what_an_algorithm_ignores_beside_a_correction_is_refused(
    name: str, parameters: dict[str, JsonValue], message: str
) -> None:
    correction: dict[str, JsonValue] = {"correction": {"kind": "TIS", "high": 2}}
    with pytest.raises(ValueError, match=message):
        check_algorithm(name, correction | parameters)


def test_a_clip_that_only_later_updates_need_is_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="ignored with updatesPerBatch 1"):
        check_algorithm("DecoupledPPO", {"clipLow": 0.2, "updatesPerBatch": 1})
    correction: dict[str, JsonValue] = {"kind": "TIS", "high": 2}
    with_several: dict[str, JsonValue] = {"clipLow": 0.2, "updatesPerBatch": 2}
    with_several["correction"] = correction
    assert check_algorithm("DrGRPO", with_several).updates_per_batch == 2


def test_more_updates_than_groups_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="updatesPerBatch: 8 updates cannot share 4 groups"):
        check_algorithm("GRPO", {"updatesPerBatch": 8}, prompts_per_step=4)
    assert check_algorithm("GSPO", {}, prompts_per_step=2).updates_per_batch == 4


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"kind": "TIS"}, "kind TIS needs high"),
        ({"kind": "TIS", "low": 0.5, "high": 2}, "kind TIS ignores low"),
        ({"high": 2}, "kind None ignores high"),
        ({"kind": "IcePop", "low": 5, "high": 0.5}, "low 5 is not below high 0.5"),
        ({"kind": "Tis", "high": 2}, "should be 'None', 'TIS', 'IcePop' or 'SequenceMaskTIS'"),
    ],
)
def test_bounds_that_do_not_fit_the_correction_are_refused(
    correction: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_algorithm("RLOO", {"correction": correction})  # type: ignore[dict-item]  # on purpose


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"klCoefficient: -1 .*; .*clipLow: -1 "):
        check_algorithm("DrGRPO", {"clipLow": -1, "klCoefficient": -1})


@pytest.mark.parametrize(
    "parameters",
    [{"klCoefficient": 0.1, "klCredit": "K3Loss"}, {"klLoss": "k3"}, {"klEstimator": "k3"}],
)
def test_a_divergence_as_a_loss_is_refused_with_the_reason(
    parameters: dict[str, JsonValue],
) -> None:
    with pytest.raises(ValueError, match="k3 one of wrong size and direction"):
        check_algorithm("DrGRPO", parameters)


def test_a_credit_of_no_divergence_is_refused() -> None:
    with pytest.raises(ValueError, match="klCredit is ignored with klCoefficient 0"):
        check_algorithm("GSPO", {"klCredit": "Sequence"})
