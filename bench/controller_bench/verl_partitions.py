"""`python verl_partitions.py`: partitions of verl for lengths from standard input.

Run by the Python of verl's environment, which has nothing of this project. Reads one JSON object,
{lengths, ranks, tokens}, and prints {plan, seconds}: for each rank its microbatches, of at most so
many tokens where that is possible, as verl's rearrange_micro_batches cuts them.
"""

import json
import sys
import time

from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

asked = json.loads(sys.stdin.read())
lengths, most = asked["lengths"], asked["tokens"]
began_s = time.perf_counter()
shares = get_seqlen_balanced_partitions(lengths, asked["ranks"], equal_size=False)
count = max(-(-sum(lengths[i] for i in share) // most) for share in shares)
plan = []
for share in shares:
    parts = get_seqlen_balanced_partitions(
        [lengths[i] for i in share], min(count, len(share)), equal_size=False
    )
    plan.append([[share[i] for i in part] for part in parts])
sys.stdout.write(json.dumps({"plan": plan, "seconds": time.perf_counter() - began_s}) + "\n")
