module guestagent

go 1.24
