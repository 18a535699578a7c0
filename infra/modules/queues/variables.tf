variable "name" {
  type        = string
  description = "First word of all names."
}

variable "trainium_environment_arn" {
  type        = string
  description = "Compute environment behind the Trainium queue."
}

variable "cpu_environment_arn" {
  type        = string
  description = "Compute environment behind the CPU queue."
}

variable "shares" {
  type        = map(number)
  description = "Weight by share identifier; the lower, the more."
}

variable "share_decay_s" {
  type        = number
  description = "Seconds that usage counts."
}

variable "compute_reservation" {
  type        = number
  description = "Percent held back for shares that are not active yet."
}

variable "wait_limit_s" {
  type        = number
  description = "Seconds that a job may block the head of a queue before it is cancelled."
}
