"""The production loop on one machine: a served policy, simulated users, their feedback."""
