// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * slack MS COMMAND [ARGUMENT...]: runs a command with a timer slack of MS milliseconds. The kernel
 * may end each sleep of such a task by this time later than the task requested.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	unsigned long slack_ms = argc > 2 ? strtoul(argv[1], NULL, 10) : 0;

	if (!slack_ms) {
		fputs("usage: slack MS COMMAND [ARGUMENT...]\n", stderr);
		return 2;
	}
	if (prctl(PR_SET_TIMERSLACK, slack_ms * 1000000, 0, 0, 0)) {
		perror("prctl");
		return 2;
	}
	execvp(argv[2], argv + 2);
	perror(argv[2]);
	return 127;
}
