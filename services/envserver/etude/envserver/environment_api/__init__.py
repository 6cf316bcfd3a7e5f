"""Environment API: environments over HTTP for clients of E2B, OpenEnv and MCP."""
