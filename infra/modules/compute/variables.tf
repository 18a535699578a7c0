variable "name" {
  type        = string
  description = "First word of all names."
}

variable "emulator" {
  type        = bool
  description = "The account is moto."
}

variable "subnet_id" {
  type        = string
  description = "Where instances start."
}

variable "security_group_id" {
  type        = string
  description = "Group of all instances."
}

variable "instance_type" {
  type        = string
  description = "Trainium instances."
}

variable "max_vcpus" {
  type        = number
  description = "vCPU of all Trainium instances at once."
}

variable "efa_interfaces" {
  type        = number
  description = "EFA interfaces of an instance, one a network card."
}

variable "ami_id" {
  type        = string
  description = "Image of Trainium instances: ECS agent and Neuron driver."
}

variable "capacity_block_id" {
  type        = string
  description = "Capacity block that Trainium instances come from; empty: on demand."
}

variable "root_volume_gib" {
  type        = number
  description = "Root volume of a Trainium instance, which also holds images and scratch."
}

variable "stop_timeout_s" {
  type        = number
  description = "Seconds from SIGTERM to SIGKILL."
}

variable "cpu" {
  type        = object({ instance_types = list(string), max_vcpus = number, spot = bool, root_volume_gib = number })
  description = "CPU instances, for the driver, data, vectors and reports."
}
