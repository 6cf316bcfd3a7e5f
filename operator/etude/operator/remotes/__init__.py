"""Reports of run controllers and pool brokers, and commands to them."""
