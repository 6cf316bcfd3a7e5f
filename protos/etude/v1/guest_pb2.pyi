from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GuestStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUEST_STATUS_UNSPECIFIED: _ClassVar[GuestStatus]
    GUEST_STATUS_OK: _ClassVar[GuestStatus]
    GUEST_STATUS_NOT_FOUND: _ClassVar[GuestStatus]
    GUEST_STATUS_EXISTS: _ClassVar[GuestStatus]
    GUEST_STATUS_INVALID: _ClassVar[GuestStatus]
    GUEST_STATUS_DENIED: _ClassVar[GuestStatus]
    GUEST_STATUS_CONFLICT: _ClassVar[GuestStatus]
    GUEST_STATUS_TOO_LARGE: _ClassVar[GuestStatus]
    GUEST_STATUS_BUSY: _ClassVar[GuestStatus]
    GUEST_STATUS_TIMEOUT: _ClassVar[GuestStatus]
    GUEST_STATUS_CANCELLED: _ClassVar[GuestStatus]
    GUEST_STATUS_INTERNAL: _ClassVar[GuestStatus]
    GUEST_STATUS_UNSUPPORTED: _ClassVar[GuestStatus]

class GuestFault(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUEST_FAULT_UNSPECIFIED: _ClassVar[GuestFault]
    GUEST_FAULT_NO_SUCH_FILE: _ClassVar[GuestFault]
    GUEST_FAULT_IS_A_FOLDER: _ClassVar[GuestFault]
    GUEST_FAULT_NOT_A_FOLDER: _ClassVar[GuestFault]
    GUEST_FAULT_NOT_A_FILE: _ClassVar[GuestFault]
    GUEST_FAULT_BAD_NAME: _ClassVar[GuestFault]
    GUEST_FAULT_LINK: _ClassVar[GuestFault]
    GUEST_FAULT_TOO_LARGE: _ClassVar[GuestFault]
    GUEST_FAULT_TOO_MANY: _ClassVar[GuestFault]
    GUEST_FAULT_TOO_SLOW: _ClassVar[GuestFault]
    GUEST_FAULT_DENIED: _ClassVar[GuestFault]
    GUEST_FAULT_NO_SPACE: _ClassVar[GuestFault]

class GuestKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUEST_KIND_UNSPECIFIED: _ClassVar[GuestKind]
    GUEST_KIND_FILE: _ClassVar[GuestKind]
    GUEST_KIND_FOLDER: _ClassVar[GuestKind]
    GUEST_KIND_OTHER: _ClassVar[GuestKind]

class GuestJobOperation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GUEST_JOB_OPERATION_UNSPECIFIED: _ClassVar[GuestJobOperation]
    GUEST_JOB_OPERATION_STATUS: _ClassVar[GuestJobOperation]
    GUEST_JOB_OPERATION_READ: _ClassVar[GuestJobOperation]
    GUEST_JOB_OPERATION_AWAIT: _ClassVar[GuestJobOperation]
    GUEST_JOB_OPERATION_KILL: _ClassVar[GuestJobOperation]
    GUEST_JOB_OPERATION_WRITE: _ClassVar[GuestJobOperation]
GUEST_STATUS_UNSPECIFIED: GuestStatus
GUEST_STATUS_OK: GuestStatus
GUEST_STATUS_NOT_FOUND: GuestStatus
GUEST_STATUS_EXISTS: GuestStatus
GUEST_STATUS_INVALID: GuestStatus
GUEST_STATUS_DENIED: GuestStatus
GUEST_STATUS_CONFLICT: GuestStatus
GUEST_STATUS_TOO_LARGE: GuestStatus
GUEST_STATUS_BUSY: GuestStatus
GUEST_STATUS_TIMEOUT: GuestStatus
GUEST_STATUS_CANCELLED: GuestStatus
GUEST_STATUS_INTERNAL: GuestStatus
GUEST_STATUS_UNSUPPORTED: GuestStatus
GUEST_FAULT_UNSPECIFIED: GuestFault
GUEST_FAULT_NO_SUCH_FILE: GuestFault
GUEST_FAULT_IS_A_FOLDER: GuestFault
GUEST_FAULT_NOT_A_FOLDER: GuestFault
GUEST_FAULT_NOT_A_FILE: GuestFault
GUEST_FAULT_BAD_NAME: GuestFault
GUEST_FAULT_LINK: GuestFault
GUEST_FAULT_TOO_LARGE: GuestFault
GUEST_FAULT_TOO_MANY: GuestFault
GUEST_FAULT_TOO_SLOW: GuestFault
GUEST_FAULT_DENIED: GuestFault
GUEST_FAULT_NO_SPACE: GuestFault
GUEST_KIND_UNSPECIFIED: GuestKind
GUEST_KIND_FILE: GuestKind
GUEST_KIND_FOLDER: GuestKind
GUEST_KIND_OTHER: GuestKind
GUEST_JOB_OPERATION_UNSPECIFIED: GuestJobOperation
GUEST_JOB_OPERATION_STATUS: GuestJobOperation
GUEST_JOB_OPERATION_READ: GuestJobOperation
GUEST_JOB_OPERATION_AWAIT: GuestJobOperation
GUEST_JOB_OPERATION_KILL: GuestJobOperation
GUEST_JOB_OPERATION_WRITE: GuestJobOperation

class GuestHello(_message.Message):
    __slots__ = ("protocol", "version", "boot_id", "capabilities", "memory_bytes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    version: str
    boot_id: bytes
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    memory_bytes: int
    def __init__(self, protocol: _Optional[int] = ..., version: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., capabilities: _Optional[_Iterable[str]] = ..., memory_bytes: _Optional[int] = ...) -> None: ...

class GuestOpen(_message.Message):
    __slots__ = ("stream", "call_id", "background", "sent_bytes", "job")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    stream: int
    call_id: bytes
    background: bool
    sent_bytes: int
    job: int
    def __init__(self, stream: _Optional[int] = ..., call_id: _Optional[bytes] = ..., background: _Optional[bool] = ..., sent_bytes: _Optional[int] = ..., job: _Optional[int] = ...) -> None: ...

class GuestResetAck(_message.Message):
    __slots__ = ("boot_id", "generation", "open")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    generation: int
    open: _containers.RepeatedCompositeFieldContainer[GuestOpen]
    def __init__(self, boot_id: _Optional[bytes] = ..., generation: _Optional[int] = ..., open: _Optional[_Iterable[_Union[GuestOpen, _Mapping]]] = ...) -> None: ...

class GuestSync(_message.Message):
    __slots__ = ("wall_ns", "entropy", "env_id", "token_sha256", "generation", "hostname", "machine_id")
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    ENV_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SHA256_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    MACHINE_ID_FIELD_NUMBER: _ClassVar[int]
    wall_ns: int
    entropy: bytes
    env_id: str
    token_sha256: bytes
    generation: int
    hostname: str
    machine_id: bytes
    def __init__(self, wall_ns: _Optional[int] = ..., entropy: _Optional[bytes] = ..., env_id: _Optional[str] = ..., token_sha256: _Optional[bytes] = ..., generation: _Optional[int] = ..., hostname: _Optional[str] = ..., machine_id: _Optional[bytes] = ...) -> None: ...

class GuestSyncAck(_message.Message):
    __slots__ = ("generation", "failed")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    failed: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generation: _Optional[int] = ..., failed: _Optional[_Iterable[str]] = ...) -> None: ...

class GuestRead(_message.Message):
    __slots__ = ("path", "offset", "limit", "digest")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    limit: int
    digest: bool
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ..., digest: _Optional[bool] = ...) -> None: ...

class GuestWrite(_message.Message):
    __slots__ = ("path", "size", "sha256", "mode", "expected_sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    size: int
    sha256: bytes
    mode: int
    expected_sha256: bytes
    def __init__(self, path: _Optional[str] = ..., size: _Optional[int] = ..., sha256: _Optional[bytes] = ..., mode: _Optional[int] = ..., expected_sha256: _Optional[bytes] = ...) -> None: ...

class GuestList(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class GuestGlob(_message.Message):
    __slots__ = ("pattern",)
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    pattern: str
    def __init__(self, pattern: _Optional[str] = ...) -> None: ...

class GuestWalk(_message.Message):
    __slots__ = ("path", "hidden")
    PATH_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_FIELD_NUMBER: _ClassVar[int]
    path: str
    hidden: bool
    def __init__(self, path: _Optional[str] = ..., hidden: _Optional[bool] = ...) -> None: ...

class GuestStat(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class GuestDelete(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class GuestGrep(_message.Message):
    __slots__ = ("path", "pattern", "is_literal", "globs", "ignore_case", "multiline", "before", "after", "limit", "time_limit_ms")
    PATH_FIELD_NUMBER: _ClassVar[int]
    PATTERN_FIELD_NUMBER: _ClassVar[int]
    IS_LITERAL_FIELD_NUMBER: _ClassVar[int]
    GLOBS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_CASE_FIELD_NUMBER: _ClassVar[int]
    MULTILINE_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    TIME_LIMIT_MS_FIELD_NUMBER: _ClassVar[int]
    path: str
    pattern: str
    is_literal: bool
    globs: _containers.RepeatedScalarFieldContainer[str]
    ignore_case: bool
    multiline: bool
    before: int
    after: int
    limit: int
    time_limit_ms: int
    def __init__(self, path: _Optional[str] = ..., pattern: _Optional[str] = ..., is_literal: _Optional[bool] = ..., globs: _Optional[_Iterable[str]] = ..., ignore_case: _Optional[bool] = ..., multiline: _Optional[bool] = ..., before: _Optional[int] = ..., after: _Optional[int] = ..., limit: _Optional[int] = ..., time_limit_ms: _Optional[int] = ...) -> None: ...

class GuestHashes(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class GuestLimits(_message.Message):
    __slots__ = ("processes", "open_files", "file_bytes", "memory_bytes", "flood_bytes", "min_free_bytes")
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    OPEN_FILES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOOD_BYTES_FIELD_NUMBER: _ClassVar[int]
    MIN_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    processes: int
    open_files: int
    file_bytes: int
    memory_bytes: int
    flood_bytes: int
    min_free_bytes: int
    def __init__(self, processes: _Optional[int] = ..., open_files: _Optional[int] = ..., file_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., flood_bytes: _Optional[int] = ..., min_free_bytes: _Optional[int] = ...) -> None: ...

class GuestExec(_message.Message):
    __slots__ = ("argv", "shell", "env", "session", "background", "timeout_ms", "head_bytes", "tail_bytes", "merged", "limits", "has_input", "is_controllers")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ARGV_FIELD_NUMBER: _ClassVar[int]
    SHELL_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    HEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    TAIL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    HAS_INPUT_FIELD_NUMBER: _ClassVar[int]
    IS_CONTROLLERS_FIELD_NUMBER: _ClassVar[int]
    argv: _containers.RepeatedScalarFieldContainer[bytes]
    shell: bytes
    env: _containers.ScalarMap[str, str]
    session: str
    background: bool
    timeout_ms: int
    head_bytes: int
    tail_bytes: int
    merged: bool
    limits: GuestLimits
    has_input: bool
    is_controllers: bool
    def __init__(self, argv: _Optional[_Iterable[bytes]] = ..., shell: _Optional[bytes] = ..., env: _Optional[_Mapping[str, str]] = ..., session: _Optional[str] = ..., background: _Optional[bool] = ..., timeout_ms: _Optional[int] = ..., head_bytes: _Optional[int] = ..., tail_bytes: _Optional[int] = ..., merged: _Optional[bool] = ..., limits: _Optional[_Union[GuestLimits, _Mapping]] = ..., has_input: _Optional[bool] = ..., is_controllers: _Optional[bool] = ...) -> None: ...

class GuestJob(_message.Message):
    __slots__ = ("job", "operation", "offset", "limit", "wait_ms", "input", "end_input")
    JOB_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    END_INPUT_FIELD_NUMBER: _ClassVar[int]
    job: int
    operation: GuestJobOperation
    offset: int
    limit: int
    wait_ms: int
    input: bytes
    end_input: bool
    def __init__(self, job: _Optional[int] = ..., operation: _Optional[_Union[GuestJobOperation, str]] = ..., offset: _Optional[int] = ..., limit: _Optional[int] = ..., wait_ms: _Optional[int] = ..., input: _Optional[bytes] = ..., end_input: _Optional[bool] = ...) -> None: ...

class GuestSession(_message.Message):
    __slots__ = ("name", "close", "env")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    name: str
    close: bool
    env: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., close: _Optional[bool] = ..., env: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GuestMark(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GuestDiff(_message.Message):
    __slots__ = ("mark", "max_files", "max_bytes")
    MARK_FIELD_NUMBER: _ClassVar[int]
    MAX_FILES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    mark: str
    max_files: int
    max_bytes: int
    def __init__(self, mark: _Optional[str] = ..., max_files: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class GuestFreeze(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GuestThaw(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GuestAccept(_message.Message):
    __slots__ = ("port",)
    PORT_FIELD_NUMBER: _ClassVar[int]
    port: int
    def __init__(self, port: _Optional[int] = ...) -> None: ...

class GuestApply(_message.Message):
    __slots__ = ("deleted", "has_archive")
    DELETED_FIELD_NUMBER: _ClassVar[int]
    HAS_ARCHIVE_FIELD_NUMBER: _ClassVar[int]
    deleted: _containers.RepeatedScalarFieldContainer[str]
    has_archive: bool
    def __init__(self, deleted: _Optional[_Iterable[str]] = ..., has_archive: _Optional[bool] = ...) -> None: ...

class GuestChange(_message.Message):
    __slots__ = ("max_files", "max_bytes")
    MAX_FILES_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_files: int
    max_bytes: int
    def __init__(self, max_files: _Optional[int] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class GuestBaseFile(_message.Message):
    __slots__ = ("path", "size", "mtime_ns", "executable", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MTIME_NS_FIELD_NUMBER: _ClassVar[int]
    EXECUTABLE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    size: int
    mtime_ns: int
    executable: bool
    sha256: bytes
    def __init__(self, path: _Optional[str] = ..., size: _Optional[int] = ..., mtime_ns: _Optional[int] = ..., executable: _Optional[bool] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class GuestBase(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[GuestBaseFile]
    def __init__(self, files: _Optional[_Iterable[_Union[GuestBaseFile, _Mapping]]] = ...) -> None: ...

class GuestCall(_message.Message):
    __slots__ = ("id", "token", "deadline_ms", "uid", "cwd", "read", "write", "list", "glob", "stat", "delete", "grep", "hashes", "exec", "job", "session", "mark", "diff", "freeze_fs", "thaw_fs", "walk", "accept", "apply", "change")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    WRITE_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    GLOB_FIELD_NUMBER: _ClassVar[int]
    STAT_FIELD_NUMBER: _ClassVar[int]
    DELETE_FIELD_NUMBER: _ClassVar[int]
    GREP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    EXEC_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    DIFF_FIELD_NUMBER: _ClassVar[int]
    FREEZE_FS_FIELD_NUMBER: _ClassVar[int]
    THAW_FS_FIELD_NUMBER: _ClassVar[int]
    WALK_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    APPLY_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    id: bytes
    token: bytes
    deadline_ms: int
    uid: int
    cwd: str
    read: GuestRead
    write: GuestWrite
    list: GuestList
    glob: GuestGlob
    stat: GuestStat
    delete: GuestDelete
    grep: GuestGrep
    hashes: GuestHashes
    exec: GuestExec
    job: GuestJob
    session: GuestSession
    mark: GuestMark
    diff: GuestDiff
    freeze_fs: GuestFreeze
    thaw_fs: GuestThaw
    walk: GuestWalk
    accept: GuestAccept
    apply: GuestApply
    change: GuestChange
    def __init__(self, id: _Optional[bytes] = ..., token: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., uid: _Optional[int] = ..., cwd: _Optional[str] = ..., read: _Optional[_Union[GuestRead, _Mapping]] = ..., write: _Optional[_Union[GuestWrite, _Mapping]] = ..., list: _Optional[_Union[GuestList, _Mapping]] = ..., glob: _Optional[_Union[GuestGlob, _Mapping]] = ..., stat: _Optional[_Union[GuestStat, _Mapping]] = ..., delete: _Optional[_Union[GuestDelete, _Mapping]] = ..., grep: _Optional[_Union[GuestGrep, _Mapping]] = ..., hashes: _Optional[_Union[GuestHashes, _Mapping]] = ..., exec: _Optional[_Union[GuestExec, _Mapping]] = ..., job: _Optional[_Union[GuestJob, _Mapping]] = ..., session: _Optional[_Union[GuestSession, _Mapping]] = ..., mark: _Optional[_Union[GuestMark, _Mapping]] = ..., diff: _Optional[_Union[GuestDiff, _Mapping]] = ..., freeze_fs: _Optional[_Union[GuestFreeze, _Mapping]] = ..., thaw_fs: _Optional[_Union[GuestThaw, _Mapping]] = ..., walk: _Optional[_Union[GuestWalk, _Mapping]] = ..., accept: _Optional[_Union[GuestAccept, _Mapping]] = ..., apply: _Optional[_Union[GuestApply, _Mapping]] = ..., change: _Optional[_Union[GuestChange, _Mapping]] = ...) -> None: ...

class GuestInfo(_message.Message):
    __slots__ = ("size", "sha256", "mode", "mtime_ns", "kind")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    MTIME_NS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    size: int
    sha256: bytes
    mode: int
    mtime_ns: int
    kind: GuestKind
    def __init__(self, size: _Optional[int] = ..., sha256: _Optional[bytes] = ..., mode: _Optional[int] = ..., mtime_ns: _Optional[int] = ..., kind: _Optional[_Union[GuestKind, str]] = ...) -> None: ...

class GuestExecResult(_message.Message):
    __slots__ = ("job", "dropped_out", "dropped_err", "dropped_lines_out", "dropped_lines_err", "exit_code", "signal", "timed_out", "ended_for", "is_running", "log_bytes")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DROPPED_OUT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_ERR_FIELD_NUMBER: _ClassVar[int]
    DROPPED_LINES_OUT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_LINES_ERR_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FOR_FIELD_NUMBER: _ClassVar[int]
    IS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    LOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    job: int
    dropped_out: int
    dropped_err: int
    dropped_lines_out: int
    dropped_lines_err: int
    exit_code: int
    signal: int
    timed_out: bool
    ended_for: str
    is_running: bool
    log_bytes: int
    def __init__(self, job: _Optional[int] = ..., dropped_out: _Optional[int] = ..., dropped_err: _Optional[int] = ..., dropped_lines_out: _Optional[int] = ..., dropped_lines_err: _Optional[int] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., timed_out: _Optional[bool] = ..., ended_for: _Optional[str] = ..., is_running: _Optional[bool] = ..., log_bytes: _Optional[int] = ...) -> None: ...

class GuestUsage(_message.Message):
    __slots__ = ("cpu_us", "max_rss_bytes", "bytes_out")
    CPU_US_FIELD_NUMBER: _ClassVar[int]
    MAX_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    cpu_us: int
    max_rss_bytes: int
    bytes_out: int
    def __init__(self, cpu_us: _Optional[int] = ..., max_rss_bytes: _Optional[int] = ..., bytes_out: _Optional[int] = ...) -> None: ...

class GuestResult(_message.Message):
    __slots__ = ("status", "message", "info", "exec", "usage", "fault", "path", "is_plain")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    EXEC_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IS_PLAIN_FIELD_NUMBER: _ClassVar[int]
    status: GuestStatus
    message: str
    info: GuestInfo
    exec: GuestExecResult
    usage: GuestUsage
    fault: GuestFault
    path: str
    is_plain: bool
    def __init__(self, status: _Optional[_Union[GuestStatus, str]] = ..., message: _Optional[str] = ..., info: _Optional[_Union[GuestInfo, _Mapping]] = ..., exec: _Optional[_Union[GuestExecResult, _Mapping]] = ..., usage: _Optional[_Union[GuestUsage, _Mapping]] = ..., fault: _Optional[_Union[GuestFault, str]] = ..., path: _Optional[str] = ..., is_plain: _Optional[bool] = ...) -> None: ...

class GuestEntry(_message.Message):
    __slots__ = ("name", "kind", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: GuestKind
    size: int
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[_Union[GuestKind, str]] = ..., size: _Optional[int] = ...) -> None: ...

class GuestEntries(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[GuestEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[GuestEntry, _Mapping]]] = ...) -> None: ...

class GuestPaths(_message.Message):
    __slots__ = ("paths",)
    PATHS_FIELD_NUMBER: _ClassVar[int]
    paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, paths: _Optional[_Iterable[str]] = ...) -> None: ...

class GuestLine(_message.Message):
    __slots__ = ("number", "text", "is_match")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IS_MATCH_FIELD_NUMBER: _ClassVar[int]
    number: int
    text: str
    is_match: bool
    def __init__(self, number: _Optional[int] = ..., text: _Optional[str] = ..., is_match: _Optional[bool] = ...) -> None: ...

class GuestFileMatches(_message.Message):
    __slots__ = ("path", "lines", "num_matches")
    PATH_FIELD_NUMBER: _ClassVar[int]
    LINES_FIELD_NUMBER: _ClassVar[int]
    NUM_MATCHES_FIELD_NUMBER: _ClassVar[int]
    path: str
    lines: _containers.RepeatedCompositeFieldContainer[GuestLine]
    num_matches: int
    def __init__(self, path: _Optional[str] = ..., lines: _Optional[_Iterable[_Union[GuestLine, _Mapping]]] = ..., num_matches: _Optional[int] = ...) -> None: ...

class GuestMatches(_message.Message):
    __slots__ = ("files", "undecided")
    FILES_FIELD_NUMBER: _ClassVar[int]
    UNDECIDED_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[GuestFileMatches]
    undecided: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, files: _Optional[_Iterable[_Union[GuestFileMatches, _Mapping]]] = ..., undecided: _Optional[_Iterable[str]] = ...) -> None: ...

class GuestDigest(_message.Message):
    __slots__ = ("path", "sha256")
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    path: str
    sha256: bytes
    def __init__(self, path: _Optional[str] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class GuestDigests(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: _containers.RepeatedCompositeFieldContainer[GuestDigest]
    def __init__(self, files: _Optional[_Iterable[_Union[GuestDigest, _Mapping]]] = ...) -> None: ...

class GuestOutOfMemory(_message.Message):
    __slots__ = ("call_id",)
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    call_id: bytes
    def __init__(self, call_id: _Optional[bytes] = ...) -> None: ...

class GuestJobExit(_message.Message):
    __slots__ = ("job", "exit_code", "signal")
    JOB_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    job: int
    exit_code: int
    signal: int
    def __init__(self, job: _Optional[int] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ...) -> None: ...

class GuestEvent(_message.Message):
    __slots__ = ("oom", "job_exit")
    OOM_FIELD_NUMBER: _ClassVar[int]
    JOB_EXIT_FIELD_NUMBER: _ClassVar[int]
    oom: GuestOutOfMemory
    job_exit: GuestJobExit
    def __init__(self, oom: _Optional[_Union[GuestOutOfMemory, _Mapping]] = ..., job_exit: _Optional[_Union[GuestJobExit, _Mapping]] = ...) -> None: ...
