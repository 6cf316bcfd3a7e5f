"""OpenEnv's server protocol over HTTP and WebSockets."""
