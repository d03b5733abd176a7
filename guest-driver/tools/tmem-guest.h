/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Functions of tmem-guest that its source files share.
 */
#ifndef TMEM_GUEST_H
#define TMEM_GUEST_H

#include <stdbool.h>
#include <stddef.h>

#define SYSFS		"/sys/kernel/virtio_tmem"

/* Exit statuses, as in --help. The first failure determines the status. */
enum {
	EXIT_OK = 0,
	EXIT_SOME = 1,		/* any failure that has no status of its own */
	EXIT_USAGE = 2,
	EXIT_NO_DRIVER = 3,
	EXIT_NOT_SERVED = 4,
	EXIT_NOT_OWNER = 5,
	EXIT_UNSUPPORTED = 6,	/* the kernel or the loaded module lacks a function */
};

#define __printf(format_at, first) __attribute__((format(printf, format_at, first)))

extern bool json;	/* the option --json */

/* Reports a failure and sets the exit status, unless an earlier failure has set it. */
void __printf(2, 3) fail(int code, const char *fmt, ...);
/*
 * Prints a JSON string. A byte that is not UTF-8 becomes a lone surrogate, as with Python's
 * "surrogateescape".
 */
void json_string(const char *text);
/* Reads the first line of a file into @line. Returns false if the file cannot be opened. */
bool read_line(const char *directory, const char *name, char *line, size_t bytes);
/* Reads the driver's state. Returns false, after a message, if the module is not loaded. */
bool driver_state(char *state, size_t bytes);

/* implemented in tmem-guest_autosize.c */
extern const char autosize_text[];
/* Sets an option. Returns false if the value is wrong. */
bool autosize_option(const char *name, const char *value);
void do_autosize(void);

/* implemented in tmem-guest_trial.c */
extern const char trial_text[];
/* Sets the length of the trial. Returns false if the text is no valid number of minutes. */
bool trial_minutes(const char *text);
void do_trial(void);

#endif /* TMEM_GUEST_H */
