// Rows by another library's dot product, one row and one token at a time, on n threads that each
// have a CPU of their own. Compiled when asked for; see ggml_rows.py.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

typedef void (*Dot)(int, float *, size_t, const void *, size_t, const void *, size_t, int);

typedef struct {
    Dot dot;
    int n, n_tokens, n_threads;
    const char *w, *x;
    size_t row_bytes, x_bytes;
    long n_rows;
    float *out;
    atomic_int arrived;
} Job;

typedef struct {
    Job *job;
    int index, cpu;
    double begin, end;
} Share;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *work(void *argument) {
    Share *share = argument;
    Job *job = share->job;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(share->cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
    atomic_fetch_add(&job->arrived, 1);
    while (atomic_load(&job->arrived) < job->n_threads) sched_yield();
    long first = job->n_rows * share->index / job->n_threads;
    long stop = job->n_rows * (share->index + 1) / job->n_threads;
    share->begin = now();
    for (long r = first; r < stop; r++)
        for (int t = 0; t < job->n_tokens; t++)
            job->dot(job->n, job->out + t * job->n_rows + r, 0, job->w + job->row_bytes * r, 0,
                     job->x + job->x_bytes * t, 0, 1);
    share->end = now();
    return NULL;
}

// Seconds from the first thread's begin to the last one's end; negative when a thread is refused.
double rows_seconds(Dot dot, int n, const char *w, size_t row_bytes, long n_rows, const char *x,
                    size_t x_bytes, int n_tokens, float *out, int n_threads, const int *cpus) {
    enum { MOST = 1024 };
    static Share shares[MOST];
    pthread_t threads[MOST];
    Job job = {dot, n, n_tokens, n_threads, w, x, row_bytes, x_bytes, n_rows, out, 0};
    if (n_threads < 1 || n_threads > MOST) return -1;
    for (int i = 0; i < n_threads; i++) {
        shares[i] = (Share){&job, i, cpus[i], 0, 0};
        if (pthread_create(&threads[i], NULL, work, &shares[i])) {
            job.n_threads = i;  // those that wait go on
            for (int j = 0; j < i; j++) pthread_join(threads[j], NULL);
            return -1;
        }
    }
    double begin = 1e300, end = 0;
    for (int i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
        if (shares[i].begin < begin) begin = shares[i].begin;
        if (shares[i].end > end) end = shares[i].end;
    }
    return end - begin;
}
