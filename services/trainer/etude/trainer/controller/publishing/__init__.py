"""Publishing of policy versions, and their activation on engines."""
