"""Generated changes of our objects on a real API server, and what must hold for every one."""
