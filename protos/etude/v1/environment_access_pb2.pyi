from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FileKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FILE_KIND_UNSPECIFIED: _ClassVar[FileKind]
    FILE_KIND_FILE: _ClassVar[FileKind]
    FILE_KIND_FOLDER: _ClassVar[FileKind]
    FILE_KIND_OTHER: _ClassVar[FileKind]
FILE_KIND_UNSPECIFIED: FileKind
FILE_KIND_FILE: FileKind
FILE_KIND_FOLDER: FileKind
FILE_KIND_OTHER: FileKind

class FileEntry(_message.Message):
    __slots__ = ("path", "kind", "size")
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    path: str
    kind: FileKind
    size: int
    def __init__(self, path: _Optional[str] = ..., kind: _Optional[_Union[FileKind, str]] = ..., size: _Optional[int] = ...) -> None: ...

class TerminalSize(_message.Message):
    __slots__ = ("rows", "columns")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    columns: int
    def __init__(self, rows: _Optional[int] = ..., columns: _Optional[int] = ...) -> None: ...

class ArgumentList(_message.Message):
    __slots__ = ("arguments",)
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    arguments: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, arguments: _Optional[_Iterable[str]] = ...) -> None: ...

class ExecOpen(_message.Message):
    __slots__ = ("lease_id", "control_token", "argv", "shell", "cwd", "env", "timeout_seconds", "terminal")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    SHELL_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TERMINAL_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    argv: ArgumentList
    shell: str
    cwd: str
    env: _containers.ScalarMap[str, str]
    timeout_seconds: int
    terminal: TerminalSize
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., argv: _Optional[_Union[ArgumentList, _Mapping]] = ..., shell: _Optional[str] = ..., cwd: _Optional[str] = ..., env: _Optional[_Mapping[str, str]] = ..., timeout_seconds: _Optional[int] = ..., terminal: _Optional[_Union[TerminalSize, _Mapping]] = ...) -> None: ...

class CloseStdin(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExecRequest(_message.Message):
    __slots__ = ("open", "stdin", "close_stdin", "signal", "resize")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    CLOSE_STDIN_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    RESIZE_FIELD_NUMBER: _ClassVar[int]
    open: ExecOpen
    stdin: bytes
    close_stdin: CloseStdin
    signal: int
    resize: TerminalSize
    def __init__(self, open: _Optional[_Union[ExecOpen, _Mapping]] = ..., stdin: _Optional[bytes] = ..., close_stdin: _Optional[_Union[CloseStdin, _Mapping]] = ..., signal: _Optional[int] = ..., resize: _Optional[_Union[TerminalSize, _Mapping]] = ...) -> None: ...

class ExecStarted(_message.Message):
    __slots__ = ("number",)
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    number: int
    def __init__(self, number: _Optional[int] = ...) -> None: ...

class ExecExit(_message.Message):
    __slots__ = ("exit_code", "ended_for", "cpu_ms")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FOR_FIELD_NUMBER: _ClassVar[int]
    CPU_MS_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    ended_for: str
    cpu_ms: int
    def __init__(self, exit_code: _Optional[int] = ..., ended_for: _Optional[str] = ..., cpu_ms: _Optional[int] = ...) -> None: ...

class ExecResponse(_message.Message):
    __slots__ = ("started", "stdout", "stderr", "exit")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    started: ExecStarted
    stdout: bytes
    stderr: bytes
    exit: ExecExit
    def __init__(self, started: _Optional[_Union[ExecStarted, _Mapping]] = ..., stdout: _Optional[bytes] = ..., stderr: _Optional[bytes] = ..., exit: _Optional[_Union[ExecExit, _Mapping]] = ...) -> None: ...

class ReadFileRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "path")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    path: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ReadFileResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...

class WriteFileRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "path", "chunk")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    path: str
    chunk: bytes
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., path: _Optional[str] = ..., chunk: _Optional[bytes] = ...) -> None: ...

class WriteFileResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: FileEntry
    def __init__(self, entry: _Optional[_Union[FileEntry, _Mapping]] = ...) -> None: ...

class StatFileRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "path")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    path: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class StatFileResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: FileEntry
    def __init__(self, entry: _Optional[_Union[FileEntry, _Mapping]] = ...) -> None: ...

class ListFilesRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "path")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    path: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class ListFilesResponse(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[FileEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[FileEntry, _Mapping]]] = ...) -> None: ...

class MakeFolderRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "path")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    path: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class MakeFolderResponse(_message.Message):
    __slots__ = ("is_new",)
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    is_new: bool
    def __init__(self, is_new: _Optional[bool] = ...) -> None: ...

class MoveFileRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "path", "new_path")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NEW_PATH_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    path: str
    new_path: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., path: _Optional[str] = ..., new_path: _Optional[str] = ...) -> None: ...

class MoveFileResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: FileEntry
    def __init__(self, entry: _Optional[_Union[FileEntry, _Mapping]] = ...) -> None: ...

class RemoveFileRequest(_message.Message):
    __slots__ = ("lease_id", "control_token", "path")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CONTROL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    control_token: str
    path: str
    def __init__(self, lease_id: _Optional[str] = ..., control_token: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class RemoveFileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
