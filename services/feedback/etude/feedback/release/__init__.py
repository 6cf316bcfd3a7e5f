"""Release: decisions about the versions that users are served."""
