"""`python -m etude.operator.local`: the local runtime as a program."""

from etude.operator.local.runtime import main

main()
