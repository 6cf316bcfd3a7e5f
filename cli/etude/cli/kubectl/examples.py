"""Two examples for each verb of the plugin, shown at the end of its help."""

EXAMPLES = {
    "status": ("kubectl etude status demo", "kubectl etude status demo -n lab -o json"),
    "why": ("kubectl etude why demo", "kubectl etude why demo -n lab -o json"),
    "watch": ("kubectl etude watch demo", "kubectl etude watch demo --plain"),
    "top": ("kubectl etude top", "kubectl etude top --all-namespaces --sort steps"),
    "logs": (
        "kubectl etude logs demo --role trainer --follow",
        "kubectl etude logs demo --role inference --previous",
    ),
    "stacks": ("kubectl etude stacks demo", "kubectl etude stacks demo --role inference"),
    "checkpoint": ("kubectl etude checkpoint demo", "kubectl etude checkpoint demo --now --wait"),
    "suspend": ("kubectl etude suspend demo", "kubectl etude suspend demo --wait"),
    "resume": ("kubectl etude resume demo", "kubectl etude resume demo --wait"),
}
FLAGS = (
    "kubectl's own flags work here too: --namespace, --context, --kubeconfig, --as,"
    " --request-timeout and the other flags of kubectl options."
)


def epilog(verb: str) -> str:
    """The examples of a verb and what else it takes, as the last paragraphs of its help."""
    lines = "\n\n".join(f"  {line}" for line in EXAMPLES[verb])
    return f"{FLAGS}\n\nExamples:\n\n{lines}"
