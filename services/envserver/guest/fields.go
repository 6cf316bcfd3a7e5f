package main

// Field numbers of the messages, in guest.proto's order.

func (m *helloMessage) fields(v *visitor) {
	integer(v, 1, &m.protocol)
	v.text(2, &m.version)
	v.blob(3, &m.bootID)
	v.texts(4, &m.capabilities)
	integer(v, 5, &m.memoryBytes)
}

func (m *openMessage) fields(v *visitor) {
	integer(v, 1, &m.stream)
	v.blob(2, &m.callID)
	v.truth(3, &m.background)
	integer(v, 4, &m.sentBytes)
	integer(v, 5, &m.job)
}

func (m *resetAckMessage) fields(v *visitor) {
	v.blob(1, &m.bootID)
	integer(v, 2, &m.generation)
	many(v, 3, &m.open)
}

func (m *syncMessage) fields(v *visitor) {
	v.fixed64(1, &m.wallNs)
	v.blob(2, &m.entropy)
	v.text(3, &m.envID)
	v.blob(4, &m.tokenSHA256)
	integer(v, 5, &m.generation)
	v.text(6, &m.hostname)
	v.blob(7, &m.machineID)
}

func (m *syncAckMessage) fields(v *visitor) {
	integer(v, 1, &m.generation)
	v.texts(2, &m.failed)
}

func (m *readMessage) fields(v *visitor) {
	v.text(1, &m.path)
	integer(v, 2, &m.offset)
	integer(v, 3, &m.limit)
	v.truth(4, &m.digest)
}

func (m *writeMessage) fields(v *visitor) {
	v.text(1, &m.path)
	integer(v, 2, &m.size)
	v.blob(3, &m.sha256)
	integer(v, 4, &m.mode)
	v.blob(5, &m.expectedSHA256)
}

func (m *pathMessage) fields(v *visitor) { v.text(1, &m.path) }

func (m *globMessage) fields(v *visitor) { v.text(1, &m.pattern) }

func (m *walkMessage) fields(v *visitor) {
	v.text(1, &m.path)
	v.truth(2, &m.hidden)
}

func (m *grepMessage) fields(v *visitor) {
	v.text(1, &m.path)
	v.text(2, &m.pattern)
	v.truth(3, &m.isLiteral)
	v.texts(4, &m.globs)
	v.truth(5, &m.ignoreCase)
	v.truth(6, &m.multiline)
	integer(v, 7, &m.before)
	integer(v, 8, &m.after)
	integer(v, 9, &m.limit)
	integer(v, 10, &m.timeLimitMs)
}

func (m *limitsMessage) fields(v *visitor) {
	integer(v, 1, &m.processes)
	integer(v, 2, &m.openFiles)
	integer(v, 3, &m.fileBytes)
	integer(v, 4, &m.memoryBytes)
	integer(v, 5, &m.floodBytes)
	integer(v, 6, &m.minFreeBytes)
}

func (m *pairMessage) fields(v *visitor) {
	v.text(1, &m.key)
	v.text(2, &m.value)
}

func (m *execMessage) fields(v *visitor) {
	v.blobs(1, &m.argv)
	v.blob(2, &m.shell)
	many(v, 3, &m.env)
	v.text(4, &m.session)
	v.truth(5, &m.background)
	integer(v, 6, &m.timeoutMs)
	integer(v, 7, &m.headBytes)
	integer(v, 8, &m.tailBytes)
	v.truth(9, &m.merged)
	one(v, 10, &m.limits)
	v.truth(11, &m.hasInput)
	v.truth(12, &m.isControllers)
}

func (m *jobMessage) fields(v *visitor) {
	integer(v, 1, &m.job)
	integer(v, 2, &m.operation)
	integer(v, 3, &m.offset)
	integer(v, 4, &m.limit)
	integer(v, 5, &m.waitMs)
	v.blob(6, &m.input)
	v.truth(7, &m.endInput)
}

func (m *sessionMessage) fields(v *visitor) {
	v.text(1, &m.name)
	v.truth(2, &m.close)
	many(v, 3, &m.env)
}

func (m *markMessage) fields(v *visitor) { v.text(1, &m.name) }

func (m *diffMessage) fields(v *visitor) {
	v.text(1, &m.mark)
	integer(v, 2, &m.maxFiles)
	integer(v, 3, &m.maxBytes)
}

func (m *acceptMessage) fields(v *visitor) { integer(v, 1, &m.port) }

func (m *applyMessage) fields(v *visitor) {
	v.texts(1, &m.deleted)
	v.truth(2, &m.hasArchive)
}

func (m *changeMessage) fields(v *visitor) {
	integer(v, 1, &m.maxFiles)
	integer(v, 2, &m.maxBytes)
}

func (m *baseFileMessage) fields(v *visitor) {
	v.text(1, &m.path)
	integer(v, 2, &m.size)
	integer(v, 3, &m.mtimeNs)
	v.truth(4, &m.executable)
	v.blob(5, &m.sha256)
}

func (m *emptyMessage) fields(*visitor) {}

func (m *callMessage) fields(v *visitor) {
	v.blob(1, &m.id)
	v.blob(2, &m.token)
	integer(v, 3, &m.deadlineMs)
	optional(v, 4, &m.uid)
	v.text(5, &m.cwd)
	if v.number != 0 && v.number < 10 {
		return // four of a call's five fields: the rest need not be asked
	}
	one(v, 10, &m.read)
	one(v, 11, &m.write)
	one(v, 13, &m.list)
	one(v, 14, &m.glob)
	one(v, 15, &m.stat)
	one(v, 16, &m.delete)
	one(v, 17, &m.grep)
	one(v, 18, &m.hashes)
	one(v, 19, &m.exec)
	one(v, 20, &m.job)
	one(v, 21, &m.session)
	one(v, 22, &m.mark)
	one(v, 23, &m.diff)
	one(v, 24, &m.freeze)
	one(v, 25, &m.thaw)
	one(v, 26, &m.walk)
	one(v, 27, &m.accept)
	one(v, 28, &m.apply)
	one(v, 29, &m.change)
}

func (m *infoMessage) fields(v *visitor) {
	integer(v, 1, &m.size)
	v.blob(2, &m.sha256)
	integer(v, 3, &m.mode)
	integer(v, 4, &m.mtimeNs)
	integer(v, 5, &m.kind)
}

func (m *execResultMessage) fields(v *visitor) {
	integer(v, 1, &m.job)
	integer(v, 2, &m.droppedOut)
	integer(v, 3, &m.droppedErr)
	integer(v, 4, &m.droppedLinesOut)
	integer(v, 5, &m.droppedLnsErr)
	integer(v, 6, &m.exitCode)
	integer(v, 7, &m.signal)
	v.truth(8, &m.timedOut)
	v.text(9, &m.endedFor)
	v.truth(10, &m.isRunning)
	integer(v, 11, &m.logBytes)
}

func (m *usageMessage) fields(v *visitor) {
	integer(v, 1, &m.cpuUs)
	integer(v, 2, &m.maxRSSBytes)
	integer(v, 3, &m.bytesOut)
}

func (m *resultMessage) fields(v *visitor) {
	integer(v, 1, &m.status)
	v.text(2, &m.message)
	one(v, 3, &m.info)
	one(v, 8, &m.exec)
	one(v, 9, &m.usage)
	integer(v, 10, &m.fault)
	v.optionalText(11, &m.path)
	v.truth(12, &m.isPlain)
}

func (m *entryMessage) fields(v *visitor) {
	v.text(1, &m.name)
	integer(v, 2, &m.kind)
	integer(v, 3, &m.size)
}

func (m *entriesMessage) fields(v *visitor) { many(v, 1, &m.entries) }

func (m *pathsMessage) fields(v *visitor) { v.texts(1, &m.paths) }

func (m *lineMessage) fields(v *visitor) {
	integer(v, 1, &m.number)
	v.text(2, &m.text)
	v.truth(3, &m.isMatch)
}

func (m *fileMatchesMessage) fields(v *visitor) {
	v.text(1, &m.path)
	many(v, 2, &m.lines)
	integer(v, 3, &m.numMatches)
}

func (m *matchesMessage) fields(v *visitor) {
	many(v, 1, &m.files)
	v.texts(2, &m.undecided)
}

func (m *digestMessage) fields(v *visitor) {
	v.text(1, &m.path)
	v.blob(2, &m.sha256)
}

func (m *digestsMessage) fields(v *visitor) { many(v, 1, &m.files) }

func (m *workspaceFileMessage) fields(v *visitor) {
	v.text(1, &m.path)
	v.blob(2, &m.content)
	v.truth(3, &m.executable)
}

func (m *workspaceDiffMessage) fields(v *visitor) {
	many(v, 1, &m.written)
	v.texts(2, &m.deleted)
}

func (m *outOfMemoryMessage) fields(v *visitor) { v.blob(1, &m.callID) }

func (m *jobExitMessage) fields(v *visitor) {
	integer(v, 1, &m.job)
	integer(v, 2, &m.exitCode)
	integer(v, 3, &m.signal)
}

func (m *eventMessage) fields(v *visitor) {
	one(v, 1, &m.oom)
	one(v, 2, &m.jobExit)
}
