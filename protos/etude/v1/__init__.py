"""The wire: messages and services of every part, generated from the files beside."""
