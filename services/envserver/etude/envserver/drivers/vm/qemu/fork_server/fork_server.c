/* Loaded into a machine monitor, it makes the process one that can be forked with all its threads.
 *
 * fork(2) copies one thread of a process, and QEMU has five. So all of them are held by a signal, each
 * in its handler, while the first one forks. In the child each of the others is begun anew on its old
 * stack, where it returns from the handler as if nothing had happened.
 *
 * Orders come over a socket that the node made, with what a child has of its own: the sockets of its
 * monitor and of its guest's agent, a file for its last words, a copy of its disk, its folder's
 * name. Covered: a process whose threads wait, whose files are sockets, eventfds, a signalfd,
 * one disk that is not written to meanwhile, and files that nobody writes.
 * Not covered: epoll, io_uring, KVM, more disks, threads that are not held within three seconds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if !defined(__x86_64__) || !defined(__GLIBC__)
#error "a thread is begun anew by what glibc keeps of it on x86-64"
#endif

/* glibc keeps this signal for setuid() in threads, which QEMU's filter denies: nobody blocks it. */
enum { HOLD = 33, MOST_THREADS = 64, MOST_FILES = 128, NAME_BYTES = 4096, PATIENCE_S = 2 };
/* Where glibc keeps a thread's number; it is looked at before it is relied on. */
enum { TID_OFFSET = 0x2d0 };
enum { HOLDING, FORKING, GOING };

#define FORK_FLAGS (SIGCHLD | CLONE_PARENT | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID)
#define THREAD_FLAGS                                                                     \
    (CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM |  \
     CLONE_SETTLS | CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID)

struct thread {
    int number;
    char *self, *stack;
    jmp_buf back;
};

static struct {
    int control, qmp, agent;
    struct stat disk;
    char *mark;
    size_t mark_room;
    struct thread threads[MOST_THREADS];
    _Atomic int num_claimed, num_held, gate, is_over;
    long outcome;
    int files[4];
    char name[NAME_BYTES];
} state = {.control = -1};

/* Not libc's calls: a handler leaves errno as it was, and some of these libc does not have. */
static long call(long number, long a, long b, long c, long d, long e) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = 0;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#define CALL(number, a, b, c, d, e) \
    call(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e))

static void wait_while(_Atomic int *word, int value) {
    struct timespec limit = {.tv_nsec = 50000000};
    CALL(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, &limit, 0);
}

static void wake(_Atomic int *word) { CALL(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1 << 20, 0, 0); }

static char *own_thread(void) {
    char *found;
    __asm__ volatile("mov %%fs:0,%0" : "=r"(found));
    return found;
}

static int *number_of(char *thread) { return (int *)(thread + TID_OFFSET); }

__attribute__((noreturn, used)) static void go_back(struct thread *t) { longjmp(t->back, 1); }

/* begin_anew gives the child one of its parent's threads: it goes on where that one is held. */
static long begin_anew(struct thread *t) {
    long result;
    register long r10 __asm__("r10") = (long)number_of(t->self);
    register long r8 __asm__("r8") = (long)t->self;
    register struct thread *r12 __asm__("r12") = t;
    __asm__ volatile("syscall\n\t"
                     "test %%rax,%%rax\n\t"
                     "jnz 1f\n\t"
                     "xor %%ebp,%%ebp\n\t"
                     "mov %%r12,%%rdi\n\t"
                     "call go_back\n"
                     "1:"
                     : "=a"(result)
                     : "a"(SYS_clone), "D"(THREAD_FLAGS), "S"(t->stack), "d"(number_of(t->self)),
                       "r"(r10), "r"(r8), "r"(r12)
                     : "rcx", "r11", "memory");
    return result;
}

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define IF(value, then, otherwise) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, then, otherwise)
#define ANSWER(what) BPF_STMT(BPF_RET | BPF_K, what)

/* deny_processes leaves no way to another program, nor to another process but with these flags of
 * clone(2); 0 are none. */
static long deny_processes(uint32_t flags) {
    struct sock_filter words[] = {
        LOAD(arch),
        IF(AUDIT_ARCH_X86_64, 1, 0),
        ANSWER(SECCOMP_RET_KILL_PROCESS),
        LOAD(nr),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 6, 0),
        IF(SYS_execve, 5, 0),
        IF(SYS_execveat, 4, 0),
        IF(SYS_fork, 3, 0),
        IF(SYS_vfork, 2, 0),
        IF(SYS_clone3, 2, 0),
        IF(SYS_clone, 3, 2),
        ANSWER(SECCOMP_RET_ERRNO | EPERM),
        /* libc falls back to clone(2), whose flags can be seen. */
        ANSWER(SECCOMP_RET_ERRNO | ENOSYS),
        ANSWER(SECCOMP_RET_ALLOW),
        LOAD(args[0]),
        BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 2, 0),
        IF(flags ? flags : UINT32_MAX, 1, 0),
        ANSWER(SECCOMP_RET_ERRNO | EPERM),
        ANSWER(SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof words / sizeof *words, words};
    return CALL(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program, 0, 0);
}

/* count_of reads what an eventfd holds, without taking it; less than 0 for any other file. */
static long count_of(int file) {
    static const char wanted[] = "eventfd-count:";
    char path[40], text[512];
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", file);
    long info = CALL(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0, 0);
    if (info < 0)
        return -1;
    long size = CALL(SYS_read, info, text, sizeof text - 1, 0, 0);
    CALL(SYS_close, info, 0, 0, 0, 0);
    text[size < 0 ? 0 : size] = 0;
    const char *found = strstr(text, wanted);
    return found ? (long)strtoul(found + sizeof wanted - 1, NULL, 16) : -1;
}

static int is_moved(long from, int to, int flags) {
    int is_done = from >= 0 && CALL(SYS_dup3, from, to, flags, 0, 0) >= 0;
    CALL(SYS_close, from, 0, 0, 0, 0);
    return is_done;
}

/* is_disk tells whether a file is the disk that the parent writes to. */
static int is_disk(int file) {
    struct stat found;
    return CALL(SYS_fstat, file, &found, 0, 0, 0) == 0 && found.st_dev == state.disk.st_dev && found.st_ino == state.disk.st_ino;
}

/* has_own_files replaces what the child must not share with its parent. */
static int has_own_files(void) {
    int is_done = is_moved(state.files[0], state.qmp, O_CLOEXEC);
    is_done &= is_moved(state.files[1], state.agent, O_CLOEXEC);
    is_done &= is_moved(state.files[2], STDERR_FILENO, 0);
    CALL(SYS_close, state.control, 0, 0, 0, 0);
    for (int file = STDERR_FILENO + 1; file < MOST_FILES; file++) {
        long count = count_of(file);
        if (is_disk(file))
            is_done &= CALL(SYS_dup3, state.files[3], file, O_CLOEXEC, 0, 0) >= 0;
        if (count >= 0) {
            long fresh = CALL(SYS_eventfd2, count, EFD_CLOEXEC | EFD_NONBLOCK, 0, 0, 0);
            is_done &= is_moved(fresh, file, O_CLOEXEC);
        }
    }
    CALL(SYS_close, state.files[3], 0, 0, 0, 0);
    return is_done;
}

/* become makes the child, which has one thread so far, what its parent is. */
static void become(void) {
    size_t length = strlen(state.name);
    memcpy(state.mark, state.name, length);
    memset(state.mark + length, 0, state.mark_room - length);
    int is_done = has_own_files() && deny_processes(0) == 0;
    for (int i = 0; i < state.num_claimed; i++)
        if (state.threads[i].self != own_thread())
            is_done &= begin_anew(&state.threads[i]) > 0;
    if (!is_done)
        CALL(SYS_exit_group, 70, 0, 0, 0, 0);
}

/* hold is where every thread is while the first one forks. */
static void hold(int signal) {
    (void)signal;
    struct thread *t = &state.threads[state.num_claimed++ % MOST_THREADS];
    t->number = (int)CALL(SYS_gettid, 0, 0, 0, 0, 0);
    t->self = own_thread();
    if (_setjmp(t->back) != 0)
        return; /* the child's, on the stack of old */
    char *stack;
    __asm__ volatile("mov %%rsp,%0" : "=r"(stack));
    t->stack = (char *)((uintptr_t)(stack - 4096) & ~(uintptr_t)63);
    state.num_held++;
    wake(&state.num_held);
    for (int gate; (gate = state.gate) != GOING; wait_while(&state.gate, gate)) {
        if (gate != FORKING || state.is_over || t->number != CALL(SYS_getpid, 0, 0, 0, 0, 0))
            continue;
        state.outcome = CALL(SYS_clone, FORK_FLAGS, 0, 0, number_of(t->self), 0);
        if (state.outcome == 0) {
            become();
            return;
        }
        state.is_over = 1;
        wake(&state.is_over);
    }
    state.num_held--;
    wake(&state.num_held);
}

/* others counts all threads but this one, and sends each a signal; less than 0 when one has ended. */
static int others(int own, int signal) {
    char buffer[4096];
    long size;
    int count = 0, is_whole = 1;
    long folder = CALL(SYS_openat, AT_FDCWD, "/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0, 0);
    if (folder < 0)
        return -1;
    while ((size = CALL(SYS_getdents64, folder, buffer, sizeof buffer, 0, 0)) > 0)
        for (long at = 0; at < size; at += *(unsigned short *)(buffer + at + 16)) {
            int number = atoi(buffer + at + 19);
            if (number == 0 || number == own)
                continue;
            count++;
            if (signal && CALL(SYS_tgkill, getpid(), number, signal, 0, 0) < 0)
                is_whole = 0;
        }
    CALL(SYS_close, folder, 0, 0, 0, 0);
    return is_whole && size == 0 ? count : -1;
}

/* forked holds all threads, has the first one fork, and lets them go. */
static long forked(int own) {
    struct timespec now, began;
    int count = others(own, 0);
    if (count < 1 || count > MOST_THREADS)
        return -E2BIG;
    state.num_claimed = state.num_held = state.is_over = 0;
    state.outcome = -EAGAIN;
    state.gate = HOLDING;
    int called = others(own, HOLD);
    clock_gettime(CLOCK_MONOTONIC, &began);
    now = began;
    for (int seen; (seen = state.num_held) < count && now.tv_sec - began.tv_sec <= PATIENCE_S;) {
        wait_while(&state.num_held, seen);
        clock_gettime(CLOCK_MONOTONIC, &now);
    }
    if (called == count && state.num_held == count && others(own, 0) == count) {
        state.gate = FORKING;
        wake(&state.gate);
        while (!state.is_over)
            wait_while(&state.is_over, 0);
    }
    state.gate = GOING;
    wake(&state.gate);
    for (int seen; (seen = state.num_held) > 0;)
        wait_while(&state.num_held, seen);
    return state.outcome;
}

/* receive takes one order: four files and a name. 0 when the node has gone, less when it is none. */
static int receive(void) {
    union {
        char bytes[CMSG_SPACE(sizeof state.files)];
        struct cmsghdr align;
    } with;
    struct iovec name = {state.name, state.mark_room - 1};
    struct msghdr message = {.msg_iov = &name,
                             .msg_iovlen = 1,
                             .msg_control = with.bytes,
                             .msg_controllen = sizeof with.bytes};
    ssize_t size = recvmsg(state.control, &message, MSG_CMSG_CLOEXEC);
    if (size <= 0)
        return 0;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_len != CMSG_LEN(sizeof state.files))
        return -EINVAL;
    memcpy(state.files, CMSG_DATA(header), sizeof state.files);
    state.name[size] = 0;
    return message.msg_flags & MSG_TRUNC ? -ENAMETOOLONG : 1;
}

static void *serve(void *unused) {
    int own = (int)CALL(SYS_gettid, 0, 0, 0, 0, 0);
    for (int outcome; (outcome = receive()) != 0;) {
        if (outcome > 0)
            outcome = (int)forked(own);
        for (int i = 0; outcome != -EINVAL && i < 4; i++)
            close(state.files[i]);
        if (send(state.control, &outcome, sizeof outcome, MSG_NOSIGNAL) < 0)
            break;
    }
    _exit(0); /* without its node it is of no use */
    return unused;
}

/* gnutls makes what a guest gets of RDRAND, RDSEED and virtio-rng, and what it has in store a child
 * would share: it learns of fork(2) from libc, which this fork goes past. The kernel has no store. */
int gnutls_rnd(int level, void *to, size_t length) {
    enum { RANDOM_FAILED = -206 };
    (void)level;
    for (size_t at = 0; at < length;) {
        ssize_t got = getrandom((char *)to + at, length - at, 0);
        if (got < 0 && errno != EINTR)
            return RANDOM_FAILED;
        at += got < 0 ? 0 : (size_t)got;
    }
    return 0;
}

/* QEMU asks for the guest's memory to stay out of children. */
int madvise(void *start, size_t length, int advice) {
    if (state.control >= 0 && advice == MADV_DONTFORK)
        return 0;
    long result = CALL(SYS_madvise, start, length, advice, 0, 0);
    if (result < 0)
        errno = (int)-result;
    return result < 0 ? -1 : 0;
}

__attribute__((naked)) static void restore(void) {
    __asm__("mov $15,%eax\n\tsyscall"); /* rt_sigreturn(2) */
}

static void check(int is_so, const char *what) {
    if (!is_so) {
        fprintf(stderr, "a monitor that cannot be forked: %s\n", what);
        _exit(70);
    }
}

__attribute__((constructor)) static void begin(void) {
    const char *given = getenv("ETUDE_FORK");
    if (!given)
        return;
    int disk, count = sscanf(given, "%d %d %d %d", &state.control, &state.qmp, &state.agent, &disk);
    check(count == 4, "ETUDE_FORK is not four numbers");
    check(fstat(disk, &state.disk) == 0, "its disk is not open");
    state.mark = getenv("ETUDE_MACHINE");
    state.mark_room = state.mark ? strlen(state.mark) : 0;
    check(state.mark_room > 1 && state.mark_room <= NAME_BYTES, "no room for a child's name");
    check(*number_of(own_thread()) == getpid(), "libc keeps threads in another way");
    check(deny_processes(FORK_FLAGS) == 0, "the kernel takes no filter");
    fcntl(state.control, F_SETFD, FD_CLOEXEC);
    pthread_t server;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&server, NULL, serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    check(!failed, "no thread can be made");
    /* After the first thread, with which libc takes the signal for itself. */
    struct {
        void (*handler)(int);
        unsigned long flags;
        void (*restorer)(void);
        unsigned long mask;
    } action = {hold, 0x04000000 | SA_RESTART, restore, ~0UL}; /* SA_RESTORER */
    check(CALL(SYS_rt_sigaction, HOLD, &action, 0, 8, 0) == 0, "threads cannot be held");
}
