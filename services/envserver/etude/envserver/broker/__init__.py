"""The broker of one pool: admission, fair queue, placement, lease ledger, warm targets."""
