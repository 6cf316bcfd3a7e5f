"""The agent harness: prompt layout, tool calls, tools, turn loop; the same in training and use."""
