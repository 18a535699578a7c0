variable "name" {
  description = "First word of all names; jobs.name of the pipeline's settings."
  type        = string
}

variable "account_id" {
  description = "Id of the AWS account."
  type        = string
}

variable "queue_arns" {
  description = "Job queues whose failures and blocks are told of."
  type        = list(string)
}

variable "log_group" {
  description = "Name of the log group of all jobs, in which missed deadlines show."
  type        = string
}

variable "schedule_enabled" {
  description = "Whether cycles start by themselves; only then is silence an alarm."
  type        = bool
}

variable "dead_letter_name" {
  description = "Name of the dead-letter queue of the schedules."
  type        = string
}

variable "emails" {
  description = "Who gets the alarms; each address must confirm its subscription once."
  type        = list(string)
}

variable "budget_usd" {
  description = "US dollars a month of the whole account above which its costs are told of; 0: no budget."
  type        = number
}

variable "key_arn" {
  description = "KMS key of the topic. Its policy must let events, cloudwatch and budgets.amazonaws.com use it."
  type        = string
}
