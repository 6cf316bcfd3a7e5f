"""Cross-field rules for the size of a pool."""

from etude.common.api.meta import Rule, number
from etude.common.api.pool.autoscaling import ZeroMode

_DECIDES = "(has(self.autoscaling) && self.autoscaling.mode in ['Reactive', 'Predictive'])"
"""CEL for: the operator decides how many hosts there are."""

SIZES: tuple[Rule, ...] = (
    Rule(
        cel=f"!{_DECIDES} || !has(self.replicas)",
        holds=lambda s: not s.is_sized_for_demand or s.replicas is None,
        message="with autoscaling.mode Reactive or Predictive the operator decides how many hosts"
        " there are, and not replicas",
        fix="remove replicas, or take autoscaling.mode: Manual",
        field_path=".replicas",
    ),
    Rule(
        cel=f"!{_DECIDES} || has(self.maxReplicas)",
        holds=lambda s: not s.is_sized_for_demand or s.max_replicas is not None,
        message="with mode Reactive or Predictive a pool grows by itself, and needs maxReplicas:"
        " the most hosts that it may have",
        fix="set maxReplicas",
        field_path=".autoscaling",
    ),
    Rule(
        cel=f"{_DECIDES} || !(has(self.minIdle) || has(self.overcommitFactor))",
        holds=lambda s: (
            s.is_sized_for_demand or (s.min_idle is None and s.overcommit_factor is None)
        ),
        message="minIdle and overcommitFactor guide the operator, which decides nothing but in mode"
        " Reactive or Predictive",
        fix="remove them, or take autoscaling.mode: Reactive or Predictive",
        field_path=".autoscaling",
    ),
    Rule(
        cel="!(has(self.replicas) && has(self.maxReplicas)) || self.replicas <= self.maxReplicas",
        holds=lambda s: (
            s.replicas is None or s.max_replicas is None or s.replicas <= s.max_replicas
        ),
        message="replicas must be at most maxReplicas",
        fix="lower replicas, or raise maxReplicas",
        field_path=".replicas",
    ),
    Rule(
        cel="!(has(self.minIdle) && has(self.maxReplicas))"
        " || self.minIdle <= self.maxReplicas * self.slotsPerReplica",
        holds=lambda s: (
            s.min_idle is None
            or s.max_replicas is None
            or s.min_idle <= s.max_replicas * s.slots_per_replica
        ),
        message="minIdle must be at most maxReplicas times slotsPerReplica: it is in slots",
        fix="lower minIdle, or raise maxReplicas",
        field_path=".minIdle",
    ),
    Rule(
        cel="!has(self.minIdle) || self.minIdle == 0 || !has(self.autoscaling)"
        " || !has(self.autoscaling.scaleToZero)"
        " || self.autoscaling.scaleToZero.mode == 'Never'",
        holds=lambda s: (
            not s.min_idle
            or s.autoscaling is None
            or s.autoscaling.scale_to_zero is None
            or s.autoscaling.scale_to_zero.mode is ZeroMode.NEVER
        ),
        message="a pool that keeps minIdle slots never goes to zero, as"
        " autoscaling.scaleToZero.mode WhenIdle says",
        fix="remove minIdle, or set autoscaling.scaleToZero.mode to Never",
        field_path=".minIdle",
    ),
    Rule(
        cel="!has(self.overcommitFactor) || double(self.overcommitFactor) >= 1.0",
        holds=lambda s: s.overcommit_factor is None or number(s.overcommit_factor) >= 1,
        message="overcommitFactor must be at least 1",
        fix='set it to "1.5"',
        field_path=".overcommitFactor",
    ),
)
