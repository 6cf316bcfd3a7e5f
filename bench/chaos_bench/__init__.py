"""Parts of the bench that kills controllers."""
