output "settings" {
  value       = local.settings
  description = "Settings of a cycle on this fleet, for trnjobs --config."
}

output "settings_files" {
  value       = var.settings_files
  description = "Files that the settings go over: --config before build/infra.json."
}

output "fleet" {
  value = [
    {
      queue          = module.queues.trainium_queue.name
      type           = "EC2"
      max_vcpus      = local.max_vcpus
      instance_types = [var.instance_type]
      shares         = keys(var.shares)
    },
    {
      queue          = module.queues.cpu_queue.name
      type           = var.cpu.spot ? "SPOT" : "EC2"
      max_vcpus      = var.cpu.max_vcpus
      instance_types = var.cpu.instance_types
      shares         = keys(var.shares)
    },
  ]
  description = "What the queues can run, known before anything is made: trnjobs fit holds a plan of a cycle against it."
}

output "repository_url" {
  value       = module.storage.repository_url
  description = "Where make push sends images."
}
