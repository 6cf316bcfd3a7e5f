"""Advice for each reason code: its meaning and a fix."""

from collections.abc import Mapping

from etude.cli.kubectl.diagnose.acceptance import ACCEPTANCE
from etude.cli.kubectl.diagnose.diagnosis import (
    CANDIDATE_WAITS,
    CHECKPOINT_STAYS,
    ENVIRONMENT_LOST,
    ENVIRONMENTS_WAIT,
    USERS_UNSERVED,
    VERSION_REFUSED,
    VERSIONS_WAIT,
    Advice,
)

_LOG = "kubectl etude logs {run} --role trainer says more"
_ANEW = (
    "a failed run stays failed: apply one of another name with a storage.uri of its own, whose"
    " model.uri may be the folder `model` of the last checkpoint"
)
_BY_ITSELF = "nothing: it continues without help"

PODS = {
    "Scheduled": Advice("every pod has a node"),
    "Unschedulable": Advice(
        "no node takes a pod",
        "free what the scheduler names, add a node, or lower the role's gpusPerReplica, cpu,"
        " memory or nodeSelector",
    ),
    "GangTimeout": Advice(
        "the pods of the run are placed together or not at all, and have waited for that too long",
        "free what the scheduler names (kubectl get podgroups), ask for less, or set"
        " scheduling.gang.scope: PerRole, or remove it, while the run is suspended",
    ),
    "PodsReady": Advice("every pod is ready"),
    "PodsNotReady": Advice(
        "pods are starting",
        "an engine or a large image takes minutes; kubectl etude logs {run} shows how far they are",
    ),
    "ImagePullFailed": Advice(
        "an image cannot be had",
        "correct the image's name, or let the node pull it: imagePullSecrets, a registry that it"
        " reaches",
    ),
    "CrashLooping": Advice(
        "a container ends again and again",
        "kubectl etude logs {run} --previous shows how it ended",
    ),
    "RoleFailed": Advice(
        "a role ended on its own and is restarted",
        "nothing if it comes back; kubectl describe rlr {run} has all of its last words",
    ),
}
ENVIRONMENTS = {
    "PoolsAvailable": Advice("every pool hands out environments", "", ENVIRONMENTS_WAIT),
    "PoolWarming": Advice(
        "no host of a pool is ready yet",
        "kubectl describe envp names what its hosts wait for",
        ENVIRONMENTS_WAIT,
    ),
    "NodesReady": Advice("enough environment hosts and the broker answer", "", ENVIRONMENTS_WAIT),
    "NotNeeded": Advice("the run has no such part"),
    "ScaledToZero": Advice(
        "the pool has no hosts: its spec.replicas is 0, or no environment was requested",
        "kubectl scale envp POOL --replicas=N; one that sizes itself grows with the first request",
        ENVIRONMENTS_WAIT,
    ),
    "BurstFits": Advice("a burst of the pool's burstCapacity would have slots"),
    "BurstTooLarge": Advice(
        "a burst of the pool's burstCapacity would have to wait",
        "raise minIdle or maxReplicas, or lower autoscaling.burstCapacity",
    ),
    "Overprovisioned": Advice(
        "the pool has more hosts than recent demand explains: idle ones are deleted, and none is"
        " created",
        "report it as a bug if it lasts; overcommitFactor is where it begins",
    ),
    "BrokerNotReady": Advice(
        "the pool's broker does not answer",
        "kubectl etude logs {run} --role broker shows what it says",
        ENVIRONMENTS_WAIT,
    ),
    "PlanUnreliable": Advice(
        "the run asked for other environments than it planned, so its pools go by demand alone",
        "nothing, if its rhythm just changed: plans are believed again once they come true;"
        " etude_env_plan_error_ratio of the broker shows it",
        ENVIRONMENTS_WAIT,
    ),
    "NodesQuarantined": Advice(
        "hosts of a pool are unhealthy; others were made in their place",
        "look at one while it is kept: kubectl logs and kubectl describe pod; delete it when you"
        " have seen enough, or set health.quarantine to Never",
        ENVIRONMENTS_WAIT,
    ),
    "DriverUnavailable": Advice(
        "environment hosts end at start: their driver cannot work there",
        "choose another isolation.driver, or nodes that have what the message names (/dev/kvm)",
        ENVIRONMENTS_WAIT,
    ),
    "WaitingForEnvironments": Advice(
        "rollouts wait for environments", _BY_ITSELF, ENVIRONMENTS_WAIT
    ),
}
PROGRESS = {
    "ControllerConnected": Advice("the controller reports"),
    "ControllerUnreachable": Advice(
        "the trainer's pod is up, but its controller does not report to the operator",
        "kubectl etude stacks {run} --role trainer shows what it does; a NetworkPolicy must let the"
        " operator reach port 7000 of the trainer",
    ),
    "StepsFinish": Advice("steps finish within their deadline"),
    "Loading": Advice(
        "the controller loads its state", "nothing: a large checkpoint takes minutes; " + _LOG
    ),
    "WaitingForRoles": Advice("role pods are not ready", _BY_ITSELF),
    "WaitingForWindow": Advice(
        "a phase of type Feedback waits for the next window of users' rollouts",
        "nothing: a window closes once enough users' feedback is known; kubectl get policyroute"
        " shows whether its service is up",
    ),
    "NoProgress": Advice(
        "no step finished within the deadline, so the trainer is restarted",
        "kubectl etude logs {run} --role trainer has the stacks of the moment; raise"
        " deadlines.stepProgressSeconds if steps are that long",
    ),
    "Healthy": Advice("nothing is wrong"),
    "NotFinished": Advice("the run goes on"),
}
SAVING = {
    "CheckpointVerified": Advice("the newest checkpoint can be resumed from"),
    "NoCheckpoint": Advice("no checkpoint has been written yet"),
    "Verifying": Advice("the newest checkpoint is being read back", _BY_ITSELF),
    "Corrupt": Advice(
        "the newest checkpoint does not match its manifest; an older one is used",
        "restore the objects from a copy of the store, or delete the Checkpoint; kubectl etude"
        " checkpoint {run} shows which are Ready",
        VERSION_REFUSED,
    ),
    "StorageUnavailable": Advice(
        "the object store cannot be reached; it is tried again, and nothing is lost",
        "etude storage check URI, from a place that reaches the store, says what is wrong;"
        " credentials are in the Secret that spec.storage.secretRef names",
        VERSIONS_WAIT,
    ),
    "SuspendTimeout": Advice(
        "no checkpoint came in time before the run was suspended; the last one is used",
        "raise checkpointing.timeoutSeconds; kubectl etude checkpoint {run} shows where it resumes",
    ),
    "WaitingForRun": Advice(
        "a checkpoint was asked for, and its run does not run now or controls it no more",
        "kubectl etude why {run}",
    ),
    "RunNotFound": Advice(
        "a checkpoint was asked of a run that does not exist here",
        "correct spec.runRef.name: create the Checkpoint again",
    ),
    "Writing": Advice("a checkpoint that was asked for is written after the next step"),
    "RunOver": Advice(
        "a run ended before it wrote the checkpoint that was asked for",
        "kubectl etude checkpoint {run} shows what there is",
    ),
    "Deleting": Advice("a checkpoint's objects are being deleted", _BY_ITSELF, CHECKPOINT_STAYS),
    "DeletionFailed": Advice(
        "a checkpoint's objects could not be deleted; it is tried again",
        "give the Secret of its storage the right to delete, or remove the finalizer"
        " etude.dev/checkpoint-data to leave the objects",
        CHECKPOINT_STAYS,
    ),
    "DataOrphaned": Advice(
        "the namespace went before a checkpoint's objects; they stay in the store",
        "delete them by hand if they are not wanted: the event names the folder",
        CHECKPOINT_STAYS,
    ),
}
RELEASES = {
    "Serving": Advice("users are served", "", USERS_UNSERVED),
    "NotServing": Advice(
        "a part of a route has nothing ready",
        "kubectl describe policyroute names the part, and its pods say why",
        USERS_UNSERVED,
    ),
    "WaitingForBaseline": Advice(
        "an evaluation waits for the one that it is compared with",
        "kubectl get evalrun shows how far that is; create it, or correct comparison.baselineRef",
        CANDIDATE_WAITS,
    ),
    "Evaluating": Advice("an evaluation runs its suites", _BY_ITSELF, CANDIDATE_WAITS),
    "Evaluated": Advice("an evaluation has its figures", "", CANDIDATE_WAITS),
    "EvaluationFailed": Advice(
        "the Job of an evaluation failed too often",
        "put right what its message names, and create an EvalRun of another name; one that a route"
        " made is made again once it is deleted",
        CANDIDATE_WAITS,
    ),
    "NoNewCheckpoint": Advice(
        "a route serves the newest checkpoint of its run", _BY_ITSELF, CANDIDATE_WAITS
    ),
    "Proposed": Advice("the newest checkpoint was proposed", "", CANDIDATE_WAITS),
    "NotAutomatic": Advice(
        "policy or a freeze of a route leaves proposals to people",
        "kubectl etude propose, once spec.policy and kubectl etude unfreeze allow it",
        CANDIDATE_WAITS,
    ),
    "NoStableVersion": Advice(
        "a route has no version in use, and users get no answers",
        "kubectl etude promote ROUTE --version EPOCH.NUMBER --without-gate, once, for the first"
        " one: kubectl get rlr shows the newest version of the run",
        USERS_UNSERVED,
    ),
    "NoBaseline": Advice(
        "the checkpoint of the version in use is gone, so that nothing can be compared with it",
        "promote a version whose checkpoint is there, with kubectl etude promote --without-gate",
        CANDIDATE_WAITS,
    ),
    "NotEnoughData": Advice(
        "the gate has too few tasks or samples to decide about a checkpoint",
        "add tasks or samples to spec.gate.evaluation, as the message says; the next checkpoint is"
        " evaluated with them",
        CANDIDATE_WAITS,
    ),
    "GateRefused": Advice(
        "the gate refused a checkpoint, and users keep what they have", "", CANDIDATE_WAITS
    ),
    "ProposalRefused": Advice(
        "the feedback service refused a proposal for the reason in the message",
        "kubectl etude propose with --evalrun, once that has changed",
        CANDIDATE_WAITS,
    ),
}
REST = {
    "BudgetExceeded": Advice(
        "spec.budget is spent, so the run was saved and suspended",
        "raise the part of spec.budget that is spent, and it continues:"
        " kubectl etude resume {run} --gpu-hours HOURS, for example",
    ),
    "FailureRule": Advice(
        "a rule of spec.failurePolicy decided so",
        "put right what failed; a run that was suspended goes on after kubectl etude resume {run}",
    ),
    "ByUser": Advice("spec.suspend is true", "kubectl etude resume {run}"),
    "Suspended": Advice("its pods are released", "kubectl etude resume {run}"),
    "Suspending": Advice("a checkpoint is being written, then the pods go", _BY_ITSELF),
    "NotSuspended": Advice("the run holds its pods"),
    "Finished": Advice("the run is over and its pods are released"),
    "AllPhasesDone": Advice("every phase reached its end"),
}
ENDS = {
    "TargetReached": Advice("the last phase reached its target, before its last step"),
    "GateNotMet": Advice(
        "a phase did not reach what its gate asks for",
        "look at the curves; a run that is suspended goes on after its phases[].gate is changed"
        " (its value, or onFail: Continue) and kubectl etude resume {run}; " + _ANEW,
    ),
    "MonitorFroze": Advice(
        "a monitor raised rollouts of a phase whose monitors[] say Freeze",
        "read the rollouts of that step, and change rubric, data or action if they are hacks; the"
        " run goes on with kubectl etude resume {run}, which raises monitors[].afterStep",
    ),
    "InvalidSpec": Advice(
        "a role refused its configuration",
        "correct what the message names; " + _ANEW,
    ),
    "InvalidStatus": Advice(
        "a newer operator wrote what this one cannot read", "have its release installed again"
    ),
    "RestartsExhausted": Advice(
        "roles failed more often than failurePolicy.maxRestarts allows",
        "put right what ended its last pod; " + _ANEW,
    ),
    "DeadlineExceeded": Advice(
        "a limit of spec.deadlines was crossed",
        "raise the limit; " + _ANEW,
    ),
}
CONTROLLERS_OWN = {
    "KeyframeOverdue": Advice(
        "the newest complete version is old, so engines that join take long to catch up",
        "nothing while steps finish; the object store is slow: see the runbook",
        VERSIONS_WAIT,
    ),
    "ReplicaLagging": Advice(
        "an engine does not follow the newest version",
        "kubectl etude logs {run} --role inference says what it waits for",
        VERSIONS_WAIT,
    ),
    "InfraFailures": Advice(
        "too many rollouts met faults of the platform",
        "kubectl etude logs {run} --role node shows what failed; rollout.maxInfraFailurePercent"
        " is the limit",
        ENVIRONMENT_LOST,
    ),
    "CurriculumFailed": Advice(
        "the curriculum of a phase raised, or named a task that cannot come next",
        "mend the function of phases[].curriculum, or take the field away; " + _ANEW,
    ),
    "NonFiniteWeights": Advice(
        "a version would hold a weight that is no number",
        "lower the learning rate",
        VERSION_REFUSED,
    ),
    "KlLimit": Advice(
        "the policy left the weights that sample by more than klLimit",
        "lower the learning rate or maxStalenessVersions, raise klLimit, or set onKlLimit: Skip",
    ),
    "NonFiniteLoss": Advice("the loss is no number", "lower the learning rate; " + _LOG),
    "SamplerMismatch": Advice(
        "engines do not sample what the trainer published",
        "keep the store as it is, and compare the version in the engines' log with the newest one",
        VERSION_REFUSED,
    ),
    "VersionRefused": Advice("engines refuse a version", _LOG, VERSION_REFUSED),
    "EnginesNotServing": Advice(
        "no engine serves", "kubectl etude logs {run} --role inference says why", VERSIONS_WAIT
    ),
    "StorageInUse": Advice(
        "spec.storage.uri holds another run, perhaps a deleted one of the same name",
        "give the run a storage.uri of its own, or delete what is there",
    ),
}
"""Reasons of a run's own processes, which the operator passes on unchanged."""

FOUND_HERE = {
    "OperatorSilent": Advice(
        "the operator has not seen the run as it is",
        "look whether the operator runs and watches this namespace: kubectl get deployment -A"
        " -l app.kubernetes.io/name=etude",
    ),
    "WaitingForQuota": Advice(
        "pods wait for quota",
        "free quota of the namespace, or have it raised: kubectl describe quota",
    ),
    "CreateContainerConfigError": Advice(
        "a container's settings name what is not there", "create what the kubelet names"
    ),
    "CreateContainerError": Advice(
        "a container cannot be made", "put right what the kubelet names"
    ),
    "RunContainerError": Advice(
        "a container cannot be started", "put right what the kubelet names"
    ),
    "FailedMount": Advice(
        "a pod has a node, but nothing of it starts", "put right what the kubelet names"
    ),
    "NoIdleSlot": Advice(
        "every environment is taken",
        "kubectl scale envp POOL --replicas=N, or fewer concurrent rollouts: rollout.maxConcurrent",
        ENVIRONMENTS_WAIT,
    ),
    "SilentStep": Advice(
        "a step takes unusually long",
        "kubectl etude stacks {run} --role trainer shows what it does",
    ),
    "Terminating": Advice("it is being deleted"),
    "PersonAsked": Advice(
        "a comparison with users asks a person",
        "kubectl etude promote {run}, or kubectl etude rollback {run}",
        CANDIDATE_WAITS,
    ),
}
"""Reasons that no condition has: they are diagnosed from pods, pools and Events."""

ADVICE: Mapping[str, Advice] = {
    **ACCEPTANCE,
    **PODS,
    **ENVIRONMENTS,
    **PROGRESS,
    **SAVING,
    **RELEASES,
    **REST,
    **ENDS,
    **CONTROLLERS_OWN,
    **FOUND_HERE,
}


BY_CONDITION: Mapping[tuple[str, str], Advice] = {
    ("Accepted", "InvalidSpec"): Advice(
        "the operator cannot read a field of the spec",
        "etude lint FILE says whether the field that is named is wrong: correct it and apply again;"
        " if it is not, the operator is older than the CRDs: have it upgraded, and it"
        " continues",
    ),
    ("Failed", "InvalidParameters"): Advice(
        "the Job of an evaluation refuses what its spec names",
        "put right what its message names, and create an EvalRun of another name; in a route,"
        " correct spec.gate.evaluation, and new ones are made",
        CANDIDATE_WAITS,
    ),
}
"""Reasons with another meaning in one condition."""


def advice(reason: str, kind: str = "") -> Advice:
    """The advice for a reason of a condition; unknown reasons of a process get a general one."""
    unknown = Advice(f"a process of the run says {reason}", _LOG)
    return BY_CONDITION.get((kind, reason)) or ADVICE.get(reason, unknown)
