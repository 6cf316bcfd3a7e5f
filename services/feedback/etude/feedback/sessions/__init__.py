"""Sessions of users as candidates for tasks: found, reviewed by a person, and written."""
