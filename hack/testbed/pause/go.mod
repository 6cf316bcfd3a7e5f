module etude.dev/testbed/pause

go 1.26
