"""How other systems reach environments over HTTP: each in the words of its own clients."""
