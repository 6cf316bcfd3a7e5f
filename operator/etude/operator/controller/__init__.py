"""The controller: watch events become keys, workers reconcile each key's object."""
