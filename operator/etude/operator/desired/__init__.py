"""What should exist: pure functions from specs to manifests."""
