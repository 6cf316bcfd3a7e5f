"""Read grants: hosts without credentials read a pool's store by URLs that end soon."""
