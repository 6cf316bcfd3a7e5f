"""Advice for the reasons of condition Accepted, and of queues."""

from etude.cli.kubectl.diagnose.diagnosis import Advice

_INSTALL = "have it installed (the run then continues), or remove the field that is named"
_PARTS = {
    "JobSet": "JobSet, which",
    "Kueue": "a queue, and Kueue",
    "KubeRay": "KubeRay, which",
    "GatewayAPI": "the Gateway API, which",
    "Volcano": "a gang of Volcano, which",
}

ACCEPTANCE = {
    "Accepted": Advice("the spec is accepted"),
    "InvalidParameters": Advice(
        "a field of the spec is wrong",
        "correct the field that is named and apply again; etude lint FILE gives the same verdict"
        " with line numbers",
    ),
    "PoolNotFound": Advice(
        "the pool that the run refers to does not exist",
        "create the EnvPool in the run's namespace, or name another: kubectl get envp",
    ),
    "CheckpointNotReady": Advice(
        "the checkpoint that the run starts from, or is to be rolled back to, is not there, is"
        " not Ready, or does not hold what is wanted of it",
        "kubectl get ckpt shows what there is; kubectl etude checkpoint RUN --now has a run write"
        " one with its model",
    ),
    "FixedRolesRequired": Advice(
        "something holds a fixed number of pods for the run, and its spec lets that number change",
        "set the field that is named as the message says: scheduling.idleRoles: Hold keeps roles",
    ),
    "NameConflict": Advice(
        "the name of a part of the run is taken by an object that the run does not own",
        "delete that object, or give the run another name",
    ),
    "Refused": Advice(
        "the API server refuses a part of the run",
        "do what the message asks for; a quota needs room (kubectl describe quota), a policy a"
        " namespace that it allows",
    ),
    "NamespaceClosing": Advice(
        "the namespace is being deleted, and nothing can be created in it",
        "apply the run in another namespace; its data is still in the object store",
    ),
    "ClusterUnavailable": Advice(
        "the API server did not do what the operator asked for; it asks again",
        "look whether the API server is well: kubectl get --raw /readyz?verbose",
    ),
    "FeatureDisabled": Advice(
        "a field asks for what the operator was installed without",
        "have the chart's value that is named set, or remove the field",
    ),
    **{
        f"{part}NotInstalled": Advice(
            f"a field asks for {what} is not installed in this cluster", _INSTALL
        )
        for part, what in _PARTS.items()
    },
    "AgentSandboxNotInstalled": Advice(
        "a pool asks for Sandboxes, and agent-sandbox is not installed in this cluster",
        "have it installed with its extensions (the pool then continues), or create the pool again"
        " without backend",
    ),
    "CertManagerNotInstalled": Advice(
        "the chart's value tls.mode chooses cert-manager, which is not installed in this cluster",
        "have it installed with its CRDs (the run then continues), or another tls.mode set",
    ),
    "SandboxTemplateNotFound": Advice(
        "a pool names a SandboxTemplate that is not in its namespace",
        "create it (the pool then continues): kubectl get sandboxtemplates",
    ),
    "QuotaReserved": Advice("the queue has admitted the run"),
    "Inadmissible": Advice(
        "the queue cannot admit the run as things are",
        "have what the message names created: kubectl get localqueues says what is there",
    ),
    "Evicted": Advice(
        "the queue has taken the run's quota back",
        "nothing, if the preemption is right: it goes on when it is admitted again; kubectl"
        " get workloads names the workload that preempted it",
    ),
    "WeakIsolationNotAllowed": Advice(
        "a pool asks for process isolation, which this platform does not allow",
        "install the chart with isolation.allowProcess=true if you trust the templates, or ask for"
        " a stronger isolation.minimum",
    ),
}
