# When cycles are due. What cannot fire is refused here; jobs/schedule.py works out the times
# (years and W it does not know), and trnjobs fit names the first cycle.

locals {
  cron_fields = ["minutes", "hours", "day-of-month", "month", "day-of-week", "year"]

  # One value of each field.
  cron_value = {
    minutes      = "[0-5]?[0-9]"
    hours        = "([01]?[0-9]|2[0-3])"
    day-of-month = "(0?[1-9]|[12][0-9]|3[01])"
    month        = "(0?[1-9]|1[0-2]|JAN|FEB|MAR|APR|MAY|JUN|JUL|AUG|SEP|OCT|NOV|DEC)"
    day-of-week  = "([1-7]|SUN|MON|TUE|WED|THU|FRI|SAT)"
    year         = "(19[7-9][0-9]|2[01][0-9][0-9])"
  }

  # A part of a list: *, a or a-b, each with /n; the day of the week takes no /n.
  cron_part = { for field, value in local.cron_value : field => "(\\*|${value}(-${value})?)${field == "day-of-week" ? "" : "(/[1-9][0-9]*)?"}" }

  # What stands alone. L: the last; 15W: the working day nearest to the 15th; 6L: the last Friday; 3#2: the second Tuesday.
  cron_alone = {
    day-of-month = "|\\?|L|${local.cron_value.day-of-month}W"
    day-of-week  = "|\\?|L|${local.cron_value.day-of-week}(L|#[1-5])"
  }

  cron_field = { for field, part in local.cron_part : field => "(?i)^(${part}(,${part})*${lookup(local.cron_alone, field, "")})$" }

  # Days that no month of a list has: the 31st of short months, the 30th and 31st of February.
  cron_never = [
    "(?i)^31W? (0?[2469]|11|FEB|APR|JUN|SEP|NOV)(,(0?[2469]|11|FEB|APR|JUN|SEP|NOV))*$",
    "(?i)^3[01]W?([,-]3[01])* (0?2|FEB)(,(0?2|FEB))*$",
  ]
}

variable "schedule_expression" {
  type        = string
  description = "When cycles are due: cron(minutes hours day-of-month month day-of-week year), read in timezone. Not a rate: a cycle is named by its time, and a rate has none of its own."
  default     = "cron(0 2 * * ? *)"

  validation {
    condition     = can(regex("^cron\\([^ ()]+( [^ ()]+){5}\\)$", var.schedule_expression))
    error_message = "schedule_expression is \"${var.schedule_expression}\", ${length(split(" ", trimspace(var.schedule_expression)))} fields; expected six in cron(minutes hours day-of-month month day-of-week year), with one space between."
  }

  validation {
    condition     = try(length([for index in [2, 4] : index if split(" ", trim(var.schedule_expression, "cron()"))[index] == "?"]), 1) == 1
    error_message = "schedule_expression is \"${var.schedule_expression}\"; expected ? in exactly one of day-of-month and day-of-week."
  }

  validation {
    condition = alltrue([for index, field in split(" ", trim(var.schedule_expression, "cron()")) :
      can(regex(local.cron_field[local.cron_fields[index]], field)) if index < 6
    ])
    error_message = "schedule_expression is \"${var.schedule_expression}\", where ${join(" and ", [for index, field in split(" ", trim(var.schedule_expression, "cron()")) : "${local.cron_fields[index]} is ${field}" if index < 6 && !can(regex(local.cron_field[local.cron_fields[index]], field))])}; expected minutes 0-59, hours 0-23, day-of-month 1-31, month 1-12 or JAN-DEC, day-of-week 1-7 (1 is Sunday) or SUN-SAT, year 1970-2199; lists a,b, ranges a-b, steps a/n."
  }

  validation {
    condition     = alltrue([for found in regexall("\\b([0-9]+)-([0-9]+)", var.schedule_expression) : tonumber(found[0]) <= tonumber(found[1])])
    error_message = "schedule_expression is \"${var.schedule_expression}\", with a range that runs backwards; expected two ranges."
  }

  validation {
    condition = try(!anytrue([for never in local.cron_never :
      can(regex(never, join(" ", slice(split(" ", trim(var.schedule_expression, "cron()")), 2, 4))))
    ]), true)
    error_message = "schedule_expression is \"${var.schedule_expression}\", a day that none of its months has; expected a date that exists."
  }

  validation {
    # The last year of each part of the list: of a-b it is b, of a/n and * it is 2199.
    condition = try(anytrue([for part in split(",", split(" ", trim(var.schedule_expression, "cron()"))[5]) :
      can(regex("^(\\*|[0-9]+/)", part)) || tonumber(regex("([0-9]{4})(?:/[0-9]+)?$", part)[0]) >= tonumber(formatdate("YYYY", plantimestamp()))
    ]), true)
    error_message = "schedule_expression is \"${var.schedule_expression}\", and its last year has passed; expected ${formatdate("YYYY", plantimestamp())} or later, or *."
  }
}

variable "timezone" {
  type        = string
  description = "IANA name of the zone that the schedule is read in, such as Europe/Berlin."
  default     = "UTC"

  validation {
    condition     = can(regex("^[A-Za-z]+(/[A-Za-z0-9_+-]+){0,2}$", var.timezone)) && length(var.timezone) <= 50
    error_message = "timezone is \"${var.timezone}\"; expected an IANA name such as UTC or Europe/Berlin."
  }
}

variable "schedule_enabled" {
  type        = bool
  description = "Whether cycles start by themselves. false: make submit still works, and the watch looks after it."
  default     = true
}

variable "watch_expression" {
  type        = string
  description = "How often all open cycles are looked at, which is when a missed deadline is noticed: rate(n minutes|hours), at least once a day."
  default     = "rate(1 hour)"

  validation {
    condition     = can(regex("^rate\\((1 (minute|hour|day)|[1-9][0-9]* minutes|([2-9]|1[0-9]|2[0-4]) hours)\\)$", var.watch_expression))
    error_message = "watch_expression is \"${var.watch_expression}\"; expected a rate such as rate(1 hour) or rate(30 minutes)."
  }
}

variable "driver_attempts" {
  type        = number
  description = "Attempts of the driver and of the watch; both may be run twice without harm."
  default     = 2

  validation {
    condition     = contains(range(1, 11), var.driver_attempts)
    error_message = "driver_attempts is ${var.driver_attempts}; expected a whole number from 1 to 10."
  }
}

variable "sla_s" {
  type        = number
  description = "Seconds from its scheduled time within which a cycle must end; later is an alarm."
  default     = 28800

  validation {
    condition     = var.sla_s >= 60 && var.sla_s == floor(var.sla_s)
    error_message = "sla_s is ${var.sla_s}; expected a whole number of seconds from 60."
  }
}
