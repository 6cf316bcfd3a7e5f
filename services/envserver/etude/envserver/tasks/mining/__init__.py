"""Mining of tasks: functions of a repository are broken so that its own tests notice."""
