variable "name" {
  description = "First word of all names; jobs.name of the pipeline's settings."
  type        = string
}

variable "image" {
  description = "Image of the driver, pinned by digest."
  type        = string
}

variable "settings_files" {
  description = "Settings files inside the image, each given to the commands with --config, in this order."
  type        = list(string)
}

variable "environment" {
  description = "Settings as variables (TRNPIPE_...) of the driver and the watch."
  type        = map(string)
}

variable "queue_arn" {
  description = "Queue of the driver and the watch: CPU machines."
  type        = string
}

variable "share_identifier" {
  description = "Fair share that they are submitted under."
  type        = string
}

variable "driver_role_arn" {
  description = "Role of the driver and the watch."
  type        = string
}

variable "scheduler_role_arn" {
  description = "Role that EventBridge Scheduler takes on."
  type        = string
}

variable "expression" {
  description = "When cycles are due: cron(...); that of jobs.schedule.expression."
  type        = string
}

variable "timezone" {
  description = "IANA name of the zone that the expression is read in; that of jobs.schedule.timezone."
  type        = string
}

variable "enabled" {
  description = "Whether the schedules start anything."
  type        = bool
}

variable "watch_expression" {
  description = "How often the jobs of open cycles are looked at."
  type        = string
}

variable "attempts" {
  description = "Attempts of one driver or watch job, the first included."
  type        = number
}

variable "log_group" {
  description = "Name of the log group of all jobs."
  type        = string
}

variable "key_arn" {
  description = "KMS key of the dead-letter queue. Its policy must let scheduler.amazonaws.com use it."
  type        = string
}
