"""Agent harness: prompt layout, tool calls, tools and turn loop, the same in training and use."""
