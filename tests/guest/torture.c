// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * torture: reads the options, starts the processes, and reports progress and the result. torture.h
 * describes the program.
 *
 * Exit status: 0 all bytes right, 1 a wrong byte, 2 another failure.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "torture.h"

#define PROGRESS_MS 5000

static void usage(FILE *to)
{
	fputs("usage: torture [options] DIR\n"
	      "Random file operations in DIR, a directory on the file system under test, against a\n"
	      "model in memory.\n"
	      "  --seed=N          seed of all random choices (default: from the clock, printed)\n"
	      "  --ops=N           number of operations of all workers together (20000)\n"
	      "  --files=N         number of files of each worker (24)\n"
	      "  --size-max=BYTES  size of the largest file (2097152)\n"
	      "  --jobs=N          number of workers, each with files of its own (1)\n"
	      "  --rounds=N        number of rounds, with an unmount and a mount in between (1);\n"
"                    needs --device and --fstype\n"
	      "  --device=PATH --fstype=NAME [--mount-options=TEXT]\n"
	      "                    the file system at DIR, to unmount and mount it\n"
	      "  --no-evictor      run no process that evicts pages while the workers run\n"
	      "  --no-direct-reclaim\n"
	      "                    evict by drop_caches only, never in a task that allocates memory\n"
	      "  --no-OP           leave out the operation OP, as named in the reports\n"
	      "  --only=OP,...     run these operations only\n"
	      "  --replay=W:F      print each operation of worker W on file F\n"
	      "  --mode=versions   run readers and writers of the same blocks instead\n"
	      "  --readers=N --writers=N --direct-readers=N [--mixed]\n"
	      "                    numbers of readers and writers (2, 2), and of readers from the\n"
	      "                    disk only (0); --mixed adds a file written in both ways\n"
	      "  --scenario=NAME   run a fixed sequence of operations instead; --list names all\n",
	      to);
}

static uint64_t number(const char *name, const char *text, uint64_t most)
{
	char *end;
	uint64_t value;

	errno = 0;
	value = strtoull(text, &end, 0);
	if (errno || *end || end == text || value > most) {
		fprintf(stderr, "torture: --%s=%s is not a number up to %lu\n", name, text,
			most);
		exit(2);
	}
	return value;
}

/* Takes --no-OP out of the arguments, because getopt does not know the names of operations. */
static int take_switches(struct options *opt, int argc, char **argv)
{
	int kept = 1;

	for (int i = 1; i < argc; i++) {
		int kind = strncmp(argv[i], "--no-", 5) ? -1 : ops_find(argv[i] + 5);

		if (kind >= 0)
			opt->disabled[kind] = true;
		else
			argv[kept++] = argv[i];
	}
	argv[kept] = NULL;
	return kept;
}

static void only(struct options *opt, char *names)
{
	memset(opt->disabled, true, sizeof(opt->disabled));
	for (char *name = strtok(names, ","); name; name = strtok(NULL, ",")) {
		int kind = ops_find(name);

		if (kind < 0) {
			fprintf(stderr, "torture: --only: unknown operation %s\n", name);
			exit(2);
		}
		opt->disabled[kind] = false;
	}
}

/* Replaces memory.reclaim and memory pressure by drop_caches. */
static void no_direct_reclaim(struct options *opt)
{
	opt->direct_reclaim = false;
	opt->disabled[ops_find("reclaim")] = true;
	opt->disabled[ops_find("pressure")] = true;
}

static void parse(struct options *opt, int argc, char **argv)
{
	static const struct option names[] = {
		{ "seed", 1, NULL, 's' }, { "ops", 1, NULL, 'o' }, { "files", 1, NULL, 'f' },
		{ "size-max", 1, NULL, 'm' }, { "jobs", 1, NULL, 'j' }, { "rounds", 1, NULL, 'r' },
		{ "device", 1, NULL, 'd' }, { "fstype", 1, NULL, 't' },
		{ "mount-options", 1, NULL, 'O' }, { "no-evictor", 0, NULL, 'e' },
		{ "no-direct-reclaim", 0, NULL, 'c' },
		{ "only", 1, NULL, 'k' },
		{ "replay", 1, NULL, 'R' }, { "mode", 1, NULL, 'M' }, { "scenario", 1, NULL, 'S' },
		{ "readers", 1, NULL, 'x' }, { "writers", 1, NULL, 'y' }, { "mixed", 0, NULL, 'z' },
		{ "direct-readers", 1, NULL, 'D' },
		{ "list", 0, NULL, 'l' }, { "help", 0, NULL, 'h' }, { 0 },
	};
	int c;

	argc = take_switches(opt, argc, argv);
	while ((c = getopt_long(argc, argv, "h", names, NULL)) != -1) {
		switch (c) {
		case 's': opt->seed = number("seed", optarg, UINT64_MAX); break;
		case 'o': opt->ops = number("ops", optarg, UINT32_MAX); break;
		case 'f': opt->files = number("files", optarg, FILES_MAX); break;
		case 'm': opt->size_max = number("size-max", optarg, 1 << 30) & -PAGE; break;
		case 'j': opt->jobs = number("jobs", optarg, JOBS_MAX); break;
		case 'r': opt->rounds = number("rounds", optarg, 1000); break;
		case 'd': opt->device = optarg; break;
		case 't': opt->fstype = optarg; break;
		case 'O': opt->mount_options = optarg; break;
		case 'e': opt->evictor = false; break;
		case 'c': no_direct_reclaim(opt); break;
		case 'k': only(opt, optarg); break;
		case 'M': opt->mode = optarg; break;
		case 'S': opt->mode = optarg; break;
		case 'x': opt->readers = number("readers", optarg, JOBS_MAX); break;
		case 'y': opt->writers = number("writers", optarg, JOBS_MAX); break;
		case 'D':
			opt->direct_readers = number("direct-readers", optarg, JOBS_MAX);
			break;
		case 'z': opt->mixed = true; break;
		case 'R':
			opt->replay = sscanf(optarg, "%u:%u", &opt->replay_worker,
					     &opt->replay_file) == 2;
			break;
		case 'l': scenario_list(); exit(0);
		case 'h': usage(stdout); exit(0);
		default: usage(stderr); exit(2);
		}
	}
	if (optind + 1 != argc) {
		usage(stderr);
		exit(2);
	}
	opt->dir = argv[optind];
	if (opt->files < 16 || !opt->jobs || opt->size_max < 64 * PAGE || !opt->rounds ||
	    !opt->readers) {
		fprintf(stderr, "torture: needs at least 16 files, 1 job, 1 round, 1 reader and a "
			"size of %lu\n", 64 * PAGE);
		exit(2);
	}
	if (opt->direct_readers > opt->readers) {
		fprintf(stderr, "torture: --direct-readers must not exceed --readers\n");
		exit(2);
	}
	if (opt->rounds > 1 && (!opt->device || !opt->fstype)) {
		fprintf(stderr, "torture: --rounds needs --device and --fstype of the file system at "
			"%s\n", opt->dir);
		exit(2);
	}
}

/*
 * Runs a worker process. It runs a round of operations for each byte that it reads from `order`,
 * and then writes a byte to `answer`.
 */
static void worker_process(const struct options *opt, struct shared *shared, unsigned int id,
			   int order, int answer)
{
	uint64_t ops = opt->ops / opt->jobs / opt->rounds;
	struct worker w = {
		.id = id, .opt = opt, .shared = shared, .op_name = "start",
		.rng = { opt->seed * 0x2545f4914f6cdd1dull + id },
	};
	char byte;

	snprintf(w.dir, sizeof(w.dir), "%s/w%u", opt->dir, id);
	for (unsigned int round = 0; read(order, &byte, 1) == 1; round++) {
		worker_open(&w, round == 0);
		worker_run(&w, ops);
		worker_check_all(&w);
		worker_close(&w);
		if (write(answer, &byte, 1) != 1)
			_exit(2);
	}
	_exit(0);
}

struct crew {
	pid_t worker[JOBS_MAX], evictor;
	int order[JOBS_MAX], answer[JOBS_MAX];
};

static void progress(const struct options *opt, const struct shared *shared, uint64_t start_ns)
{
	uint64_t ops = 0;

	for (unsigned int i = 0; i < opt->jobs; i++)
		ops += shared->ops[i];
	printf("torture: %lu s, ops=%lu of %lu, evictions=%lu, puts=%lu, hits=%lu\n",
	       (now_ns() - start_ns) / 1000000000, ops, opt->ops, shared->evictions,
	       driver_stat("puts"), driver_stat("hits"));
	fflush(stdout);
}

/*
 * Waits until all workers have finished a round. Returns 0, or the exit status of the first worker
 * that ended early.
 */
static int wait_round(const struct options *opt, struct shared *shared, struct crew *crew,
		      uint64_t start_ns)
{
	struct pollfd fds[JOBS_MAX];
	unsigned int left = opt->jobs;
	int status;

	for (unsigned int i = 0; i < opt->jobs; i++)
		fds[i] = (struct pollfd){ .fd = crew->answer[i], .events = POLLIN };
	while (left) {
		if (!poll(fds, opt->jobs, PROGRESS_MS))
			progress(opt, shared, start_ns);
		for (unsigned int i = 0; i < opt->jobs; i++) {
			char byte;

			if (!fds[i].revents)
				continue;
			if (read(fds[i].fd, &byte, 1) == 1) {
				fds[i].fd = -1;
				left--;
				continue;
			}
			waitpid(crew->worker[i], &status, 0);
			crew->worker[i] = 0;
			if (WIFSIGNALED(status))
				printf("TORTURE ERROR worker %u: signal %d\n", i, WTERMSIG(status));
			return WIFEXITED(status) && WEXITSTATUS(status) ? WEXITSTATUS(status) : 2;
		}
	}
	return 0;
}

static void start_crew(const struct options *opt, struct shared *shared, struct crew *crew)
{
	for (unsigned int i = 0; i < opt->jobs; i++) {
		int order[2], answer[2];

		if (pipe2(order, O_CLOEXEC) || pipe2(answer, O_CLOEXEC)) {
			perror("torture: cannot create a pipe");
			exit(2);
		}
		crew->worker[i] = fork();
		if (!crew->worker[i]) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			close(order[1]);
			close(answer[0]);
			for (unsigned int j = 0; j < i; j++) {
				close(crew->order[j]);
				close(crew->answer[j]);
			}
			worker_process(opt, shared, i, order[0], answer[1]);
		}
		close(order[0]);
		close(answer[1]);
		crew->order[i] = order[1];
		crew->answer[i] = answer[0];
	}
	if (opt->evictor) {
		crew->evictor = fork();
		if (!crew->evictor) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			evictor_run(opt, shared);
		}
	}
}

static void between_rounds(const struct options *opt, struct shared *shared, struct crew *crew)
{
	struct timespec pause = { 0, 1000000 };

	__atomic_store_n(&shared->evictor_pause, 1, __ATOMIC_SEQ_CST);
	while (opt->evictor && !__atomic_load_n(&shared->evictor_paused, __ATOMIC_SEQ_CST)) {
		if (waitpid(crew->evictor, NULL, WNOHANG) == crew->evictor) {
			printf("TORTURE ERROR: the evictor process has died\n");
			exit(2);
		}
		nanosleep(&pause, NULL);
	}
	unmount_and_mount(opt);
	__atomic_store_n(&shared->evictor_pause, 0, __ATOMIC_SEQ_CST);
}

static void verdict(const struct options *opt, const struct shared *shared, uint64_t start_ns)
{
	uint64_t ops = 0, reads = 0, bytes = 0, longest_ns = 0, longest_op = 0;

	for (unsigned int i = 0; i < opt->jobs; i++) {
		ops += shared->ops[i];
		reads += shared->reads[i];
		bytes += shared->bytes_checked[i];
		if (shared->longest_read_ns[i] > longest_ns) {
			longest_ns = shared->longest_read_ns[i];
			longest_op = shared->longest_read_op[i];
		}
	}
	for (int i = 0; ops_name(i); i++)
		if (shared->skipped[i])
			printf("torture: skipped %s=%lu\n", ops_name(i), shared->skipped[i]);
	printf("TORTURE seed=%lu ops=%lu jobs=%u rounds=%u seconds=%lu reads=%lu checked_bytes=%lu "
	       "evictions=%lu hits=%lu longest_read_us=%lu longest_read_op=%lu done ok\n",
	       opt->seed, ops, opt->jobs, opt->rounds, (now_ns() - start_ns) / 1000000000, reads,
	       bytes, shared->evictions, driver_stat("hits"), longest_ns / 1000, longest_op);
}

static int model_run(struct options *opt, struct shared *shared)
{
	struct crew crew = { 0 };
	uint64_t start_ns = now_ns();
	int result = 0;

	opt->zero_is_wrong = zero_range_is_wrong(opt->dir);
	if (opt->zero_is_wrong)
		printf("torture: FALLOC_FL_ZERO_RANGE over the end of a file is wrong in this kernel; "
		       "the program leaves out this operation\n");
	start_crew(opt, shared, &crew);
	for (unsigned int round = 0; round < opt->rounds && !result; round++) {
		if (round)
			between_rounds(opt, shared, &crew);
		for (unsigned int i = 0; i < opt->jobs; i++)
			if (write(crew.order[i], "", 1) != 1)
				result = 2;
		result = result ? result : wait_round(opt, shared, &crew, start_ns);
	}
	/* Kill the evictor before the workers end, because it has their pipes open, too. */
	if (crew.evictor > 0) {
		kill(crew.evictor, SIGKILL);
		waitpid(crew.evictor, NULL, 0);
	}
	for (unsigned int i = 0; i < opt->jobs; i++) {
		if (result && crew.worker[i] > 0)
			kill(crew.worker[i], SIGKILL);
		close(crew.order[i]);
		if (crew.worker[i] > 0)
			waitpid(crew.worker[i], NULL, 0);
	}
	if (!result)
		verdict(opt, shared, start_ns);
	return result;
}

int main(int argc, char **argv)
{
	struct options opt = {
		.seed = 0, .ops = 20000, .files = 24, .jobs = 1, .rounds = 1, .evictor = true,
		.direct_reclaim = true,
		.size_max = 2 << 20, .mode = "model", .readers = 2, .writers = 2,
	};
	struct shared *shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE,
				     MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	int result;

	opt.seed = time(NULL) ^ (uint64_t)getpid() << 32;
	parse(&opt, argc, argv);
	if (shared == MAP_FAILED) {
		perror("torture: cannot allocate memory");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	signal(SIGPIPE, SIG_IGN);
	printf("torture: seed=%lu mode=%s memcg=%s\n", opt.seed, opt.mode,
	       memcg_init() ? "yes" : "no");
	if (!strcmp(opt.mode, "model"))
		result = model_run(&opt, shared);
	else if (!strcmp(opt.mode, "versions"))
		result = versions_run(&opt, shared);
	else
		result = scenario_run(&opt, shared);
	fflush(stdout);
	return result;
}
