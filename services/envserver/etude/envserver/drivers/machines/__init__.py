"""Virtual machines as sandboxes, whatever monitor runs them: warm pools, states, adoption."""
