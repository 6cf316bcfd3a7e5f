package main

// The messages of protos/etude/v1/guest.proto, which says what they mean.

type status uint32

const (
	statusOK          status = 1
	statusNotFound    status = 2
	statusInvalid     status = 4
	statusDenied      status = 5
	statusConflict    status = 6
	statusTooLarge    status = 7
	statusBusy        status = 8
	statusTimeout     status = 9
	statusCancelled   status = 10
	statusInternal    status = 11
	statusUnsupported status = 12
)

type kind uint32

const (
	kindFile   kind = 1
	kindFolder kind = 2
	kindOther  kind = 3
)

type (
	helloMessage struct {
		protocol     uint32
		version      string
		bootID       []byte
		capabilities []string
		memoryBytes  uint64
	}
	openMessage struct {
		stream     uint32
		callID     []byte
		background bool
		sentBytes  uint64
		job        uint32
	}
	resetAckMessage struct {
		bootID     []byte
		generation uint64
		open       []openMessage
	}
	syncMessage struct {
		wallNs      uint64
		entropy     []byte
		envID       string
		tokenSHA256 []byte
		generation  uint64
		hostname    string
		machineID   []byte
	}
	syncAckMessage struct {
		generation uint64
		failed     []string
	}
	readMessage struct {
		path          string
		offset, limit uint64
		digest        bool
	}
	writeMessage struct {
		path           string
		size           uint64
		sha256         []byte
		mode           uint32
		expectedSHA256 []byte
	}
	pathMessage struct{ path string }
	globMessage struct{ pattern string }
	walkMessage struct {
		path   string
		hidden bool
	}
	grepMessage struct {
		path, pattern         string
		isLiteral             bool
		globs                 []string
		ignoreCase, multiline bool
		before, after, limit  uint32
		timeLimitMs           uint32
	}
	limitsMessage struct {
		processes, openFiles, fileBytes, memoryBytes, floodBytes, minFreeBytes uint64
	}
	pairMessage struct{ key, value string }
	execMessage struct {
		argv                 [][]byte
		shell                []byte
		env                  []pairMessage
		session              string
		background           bool
		timeoutMs            uint32
		headBytes, tailBytes uint32
		merged               bool
		limits               *limitsMessage
		hasInput             bool
		isControllers        bool
	}
	jobMessage struct {
		job           uint32
		operation     uint32
		offset, limit uint64
		waitMs        uint32
		input         []byte
		endInput      bool
	}
	sessionMessage struct {
		name  string
		close bool
		env   []pairMessage
	}
	markMessage struct{ name string }
	diffMessage struct {
		mark     string
		maxFiles uint32
		maxBytes uint64
	}
	acceptMessage struct{ port uint32 }
	applyMessage  struct {
		deleted    []string
		hasArchive bool
	}
	changeMessage struct {
		maxFiles uint32
		maxBytes uint64
	}
	baseFileMessage struct {
		path       string
		size       uint64
		mtimeNs    int64
		executable bool
		sha256     []byte
	}
	emptyMessage struct{}
	callMessage  struct {
		id, token    []byte
		deadlineMs   uint32
		uid          *uint32
		cwd          string
		read         *readMessage
		write        *writeMessage
		list         *pathMessage
		glob         *globMessage
		stat, delete *pathMessage
		grep         *grepMessage
		hashes       *pathMessage
		exec         *execMessage
		job          *jobMessage
		session      *sessionMessage
		mark         *markMessage
		diff         *diffMessage
		freeze, thaw *emptyMessage
		walk         *walkMessage
		accept       *acceptMessage
		apply        *applyMessage
		change       *changeMessage
	}
	infoMessage struct {
		size    uint64
		sha256  []byte
		mode    uint32
		mtimeNs int64
		kind    kind
	}
	execResultMessage struct {
		job                            uint32
		droppedOut, droppedErr         uint64
		droppedLinesOut, droppedLnsErr uint64
		exitCode, signal               uint32
		timedOut                       bool
		endedFor                       string
		isRunning                      bool
		logBytes                       uint64
	}
	usageMessage  struct{ cpuUs, maxRSSBytes, bytesOut uint64 }
	resultMessage struct {
		status  status
		message string
		info    *infoMessage
		exec    *execResultMessage
		usage   *usageMessage
		fault   faultKind
		path    *string
		isPlain bool
	}
	entryMessage struct {
		name string
		kind kind
		size uint64
	}
	entriesMessage struct{ entries []entryMessage }
	pathsMessage   struct{ paths []string }
	lineMessage    struct {
		number  uint32
		text    string
		isMatch bool
	}
	fileMatchesMessage struct {
		path       string
		lines      []lineMessage
		numMatches uint32
	}
	matchesMessage struct {
		files     []fileMatchesMessage
		undecided []string
	}
	digestMessage struct {
		path   string
		sha256 []byte
	}
	digestsMessage struct{ files []digestMessage }
	// Of environments.proto.
	workspaceFileMessage struct {
		path       string
		content    []byte
		executable bool
	}
	workspaceDiffMessage struct {
		written []workspaceFileMessage
		deleted []string
	}
	outOfMemoryMessage struct{ callID []byte }
	jobExitMessage     struct{ job, exitCode, signal uint32 }
	eventMessage       struct {
		oom     *outOfMemoryMessage
		jobExit *jobExitMessage
	}
)
