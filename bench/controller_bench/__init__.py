"""Parts of the bench of the controller: rollouts in flight, its journal, and packing."""
