"""The command line: everything a person does with Etude on a machine or a cluster."""
