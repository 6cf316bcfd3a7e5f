package main

import (
	"errors"
	"syscall"
)

// faultKind is what the policy may cause and put right; every other error is the platform's.
type faultKind uint32

const (
	faultNoSuchFile faultKind = 1
	faultIsFolder   faultKind = 2
	faultNotFolder  faultKind = 3
	faultNotFile    faultKind = 4
	faultBadName    faultKind = 5
	faultLink       faultKind = 6
	faultTooLarge   faultKind = 7
	faultTooMany    faultKind = 8
	faultTooSlow    faultKind = 9
	faultDenied     faultKind = 10
	faultNoSpace    faultKind = 11
)

// fault is a faultKind about the call's own path, or about another one.
type fault struct {
	kind faultKind
	path *string
}

func (f fault) Error() string { return "fault" }

func faultAt(kind faultKind, path string) error { return fault{kind, &path} }

// refusal is an answer that is about no path.
type refusal struct {
	status status
	text   string
}

func (r refusal) Error() string { return r.text }

// ofErrno are the errors of the kernel that a policy can cause.
var ofErrno = map[syscall.Errno]faultKind{
	syscall.ENOENT:       faultNoSuchFile,
	syscall.ENOTDIR:      faultNotFolder,
	syscall.EISDIR:       faultIsFolder,
	syscall.ELOOP:        faultLink,
	syscall.ENXIO:        faultNotFile,
	syscall.ENAMETOOLONG: faultBadName,
	syscall.EACCES:       faultDenied,
	syscall.EPERM:        faultDenied,
	syscall.EROFS:        faultDenied,
	syscall.ENOSPC:       faultNoSpace,
	syscall.EDQUOT:       faultNoSpace,
	syscall.EFBIG:        faultNoSpace,
}

var ofFault = map[faultKind]status{
	faultNoSuchFile: statusNotFound,
	faultTooLarge:   statusTooLarge,
	faultTooMany:    statusTooLarge,
	faultTooSlow:    statusTimeout,
	faultDenied:     statusDenied,
	faultNoSpace:    statusTooLarge,
}

// failure is the result that says what an error was.
func failure(err error) *resultMessage {
	var refused refusal
	if errors.As(err, &refused) {
		return &resultMessage{status: refused.status, message: refused.text}
	}
	var named fault
	var errno syscall.Errno
	if !errors.As(err, &named) && errors.As(err, &errno) {
		named.kind = ofErrno[errno]
	}
	if named.kind == 0 {
		return &resultMessage{status: statusInternal, message: err.Error()}
	}
	result := &resultMessage{status: statusInvalid, fault: named.kind, path: named.path}
	if known, ok := ofFault[named.kind]; ok {
		result.status = known
	}
	return result
}

// isSkipped is true for a name that a walk passes over: gone, closed or exchanged under it.
func isSkipped(err error) bool {
	var named fault
	return errors.As(err, &named) || err == syscall.ENOENT || err == syscall.EACCES ||
		err == syscall.EPERM
}
