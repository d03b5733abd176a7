// SPDX-License-Identifier: GPL-2.0-only
/* Instances of the tracepoints, and the names that tracepoints and counters share. */
#include "core.h"

#define CREATE_TRACE_POINTS
#include "../trace.h"

const char *const tmem_stat_names[NR_TMEM_STATS] = {
#define TMEM_STAT(name) __stringify(name),
#include "stats_list.h"
#undef TMEM_STAT
};
